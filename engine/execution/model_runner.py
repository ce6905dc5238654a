"""Runs one step on a real model: move blocks, build inputs, run the decoder, sample."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.block_mover import BlockMover
from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.row_masks import RowMasks
from engine.execution.runner import ModelLimits
from engine.execution.sampler import SampledRows, Sampler
from engine.execution.token_logprobs import prompt_logprobs
from engine.grammar.grammar_rows import GrammarRows
from engine.interface.token_logprobs import StepLogprobs, TokenLogprob
from engine.layers.attention import CacheShape, attention_batch
from engine.layers.step_layout import StepLayout, step_layout
from engine.models.decoder import Decoder
from engine.scheduling.scheduler_output import SchedulerOutput

_NOT_FINITE = "The model's hidden states are not finite."
_NO_SCORES = "The model gave no finite scores."


class ModelRunner:
    """A Runner over a decoder and the KV cache tensor it fills.

    `grammars` follows the outputs of rows with a grammar; without it there must be none.

    The cache is [layers, 2 x kv_heads, num_blocks x block_size, head_dim]. It holds finite
    numbers only: attention masks stale places but still multiplies them.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        grammars: GrammarRows | None = None,
    ) -> None:
        description = model.description
        self.limits = ModelLimits(
            vocab_size=description.vocab_size,
            max_model_len=description.max_position_embeddings,
            eos_token_ids=description.eos_token_ids,
        )
        self._model = model
        self._shape = CacheShape(
            description.num_kv_heads, num_blocks, block_size, description.head_dim
        )
        self._caches = torch.zeros(
            description.num_layers,
            2 * description.num_kv_heads,
            num_blocks * block_size,
            description.head_dim,
            dtype=model.dtype,
        )
        self._mover = BlockMover(self._caches, block_size, num_host_blocks)
        self._sampler = Sampler(description.eos_token_ids)
        self._masks = RowMasks(grammars, self.limits)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see Runner."""
        with torch.inference_mode():
            moves_s = self._mover.carry_out(work.moves) if work.moves else 0.0
            if not work.num_rows:
                return ModelRunnerOutput(np.empty(0, dtype=np.int64), moves_s=moves_s)
            self._masks.begin(work)
            layout = step_layout(
                work.starts, work.counts, work.block_tables, self._shape.block_size
            )
            hidden = self._model.hidden_states(
                torch.from_numpy(work.token_ids),
                torch.from_numpy(layout.positions),
                attention_batch(
                    layout, self._shape, self._model.dtype, self._model.description.windows
                ),
                self._caches,
            )
            allowed, errors = self._masks.finish()
            errors |= self._broken_rows(layout, hidden)
            scores = self._scored(work, layout, hidden, errors)
            is_wanted = work.is_sampled.copy()
            is_wanted[list(errors)] = False
            token_ids, chosen = self._sampled(work, layout, hidden, is_wanted, allowed)
            unscored = np.flatnonzero(work.is_sampled & (token_ids == NO_TOKEN)).tolist()
            errors = dict.fromkeys(unscored, _NO_SCORES) | errors
            logprobs = StepLogprobs(chosen, scores) if chosen or scores else None
            return ModelRunnerOutput(token_ids, errors, moves_s, logprobs)

    def _sampled(
        self,
        work: SchedulerOutput,
        layout: StepLayout,
        hidden: Tensor,
        is_wanted: NDArray[np.bool_],
        allowed: Mapping[int, NDArray[np.bool_]],
    ) -> tuple[NDArray[np.int64], dict[int, TokenLogprob]]:
        token_ids = np.full(work.num_rows, NO_TOKEN)
        wanted = np.flatnonzero(is_wanted)
        if not wanted.size:
            return token_ids, {}
        rows = wanted.tolist()
        index = {row: i for i, row in enumerate(rows)} if work.histories else {}
        last = torch.from_numpy(layout.offsets[wanted + 1] - 1)
        sampled, logprobs = self._sampler.sample(
            self._model.logits(hidden[last]),
            SampledRows(
                [work.specs[row] for row in rows],
                work.slots[wanted],
                work.ends[wanted],
                {index[row]: history for row, history in work.histories.items() if row in index},
                {index[row]: tokens for row, tokens in allowed.items() if row in index},
            ),
        )
        token_ids[wanted] = sampled
        return token_ids, {rows[i]: entry for i, entry in logprobs.items()}

    def _scored(
        self, work: SchedulerOutput, layout: StepLayout, hidden: Tensor, errors: dict[int, str]
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """What the model thought of the prompt tokens that it was asked about, by row.

        A row without finite scores becomes an error.
        """
        scores = {}
        for row, targets in work.targets.items():
            if row in errors:
                continue
            start = int(layout.offsets[row])
            entries = prompt_logprobs(
                self._model.logits,
                hidden[start : start + len(targets)],
                targets,
                work.specs[row].sampling.prompt_logprobs or 0,
            )
            if entries is None:
                errors[row] = _NO_SCORES
            else:
                scores[row] = entries
        return scores

    def _broken_rows(self, layout: StepLayout, hidden: Tensor) -> dict[int, str]:
        """Rows with a NaN or infinity in this step, and why; what they wrote is wiped at once."""
        is_broken = ~hidden.isfinite().all(dim=-1).numpy()
        if not is_broken.any():
            return {}
        rows = np.unique(layout.rows[is_broken])
        written = layout.slots[np.isin(layout.rows, rows)]
        self._caches[:, :, torch.from_numpy(written)] = 0
        return dict.fromkeys(rows.tolist(), _NOT_FINITE)
