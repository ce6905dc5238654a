"""Runs one step on a real model: move blocks, build inputs, run the decoder, sample."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.model_runner_output import NO_TOKEN, ModelRunnerOutput
from engine.execution.rank_model import RankModel
from engine.execution.row_masks import RowMasks
from engine.execution.runner import ModelLimits
from engine.execution.sampler import SampledRows, Sampler
from engine.execution.token_logprobs import prompt_logprobs
from engine.grammar.grammar_rows import GrammarRows
from engine.interface.token_logprobs import StepLogprobs, TokenLogprob
from engine.layers.step_layout import StepLayout
from engine.models.decoder import Decoder
from engine.scheduling.scheduler_output import SchedulerOutput

_NOT_FINITE = "The model's hidden states are not finite."
_NO_SCORES = "The model gave no finite scores."


class ModelRunner:
    """A Runner over a decoder and the KV cache that it fills.

    `grammars` follows the outputs of rows with a grammar; without it there must be none.
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
        self._rank = RankModel(model, num_blocks, block_size, num_host_blocks)
        self._logits = model.logits
        self._sampler = Sampler(description.eos_token_ids)
        self._masks = RowMasks(grammars, self.limits)

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see Runner."""
        with torch.inference_mode():
            moves_s = self._rank.move(work)
            if not work.num_rows:
                return ModelRunnerOutput(np.empty(0, dtype=np.int64), moves_s=moves_s)
            self._masks.begin(work)
            layout, hidden, broken = self._rank.hidden_states(work)
            allowed, errors = self._masks.finish()
            errors |= dict.fromkeys(broken, _NOT_FINITE)
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
        sampled, logprobs = self._sampler.sample(
            self._logits(hidden, layout.offsets[wanted + 1] - 1),
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

            def logits_of(begin: int, end: int, start: int = start) -> Tensor:
                return self._logits(hidden, np.arange(start + begin, start + end))

            entries = prompt_logprobs(
                logits_of,
                targets,
                work.specs[row].sampling.prompt_logprobs or 0,
            )
            if entries is None:
                errors[row] = _NO_SCORES
            else:
                scores[row] = entries
        return scores
