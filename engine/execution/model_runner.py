"""Runs one step on a real model: build the inputs, run the decoder, sample. Nothing else."""

import torch
from torch import Tensor

from engine.execution.model_runner_output import ModelRunnerOutput, RowResult
from engine.execution.runner import ModelLimits
from engine.execution.sampler import sample
from engine.layers.attention import CacheShape, Span, attention_batch
from engine.models.decoder import Decoder
from engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput


class ModelRunner:
    """A Runner over a decoder and the KV cache tensor it fills.

    The cache is [layers, 2 x kv_heads, num_blocks x block_size, head_dim]. It holds finite
    numbers only: attention masks stale places but still multiplies them.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
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

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; see Runner."""
        with torch.inference_mode():
            sequences = work.sequences
            spans = [Span(s.start, len(s.token_ids), s.block_table) for s in sequences]
            batch = attention_batch(spans, self._shape, self._model.dtype)
            hidden = self._model.hidden_states(
                torch.tensor([token_id for s in sequences for token_id in s.token_ids]),
                torch.tensor([p for s in sequences for p in range(s.start, s.end)]),
                batch,
                self._caches,
            )
            broken = self._broken_sequences(sequences, hidden, batch.slots)
            return ModelRunnerOutput(tuple(self._results(sequences, hidden, broken)))

    def _results(
        self, sequences: tuple[ScheduledSequence, ...], hidden: Tensor, broken: set[int]
    ) -> list[RowResult]:
        results = [RowResult() for _ in sequences]
        for index in broken:
            results[index] = RowResult(error="The model's hidden states are not finite.")
        wanted = [i for i, s in enumerate(sequences) if s.is_sampled and i not in broken]
        if wanted:
            ends = _row_ends(sequences)
            logits = self._model.logits(hidden[[ends[i] - 1 for i in wanted]])
            sampled = sample(logits, [sequences[i] for i in wanted], self.limits.eos_token_ids)
            for index, result in zip(wanted, sampled, strict=True):
                results[index] = result
        return results

    def _broken_sequences(
        self, sequences: tuple[ScheduledSequence, ...], hidden: Tensor, slots: Tensor
    ) -> set[int]:
        """Sequences with a NaN or infinity in this step; what they wrote is wiped at once."""
        is_finite = hidden.isfinite().all(dim=-1)
        if bool(is_finite.all()):
            return set()
        broken = set()
        first = 0
        for index, end in enumerate(_row_ends(sequences)):
            if not bool(is_finite[first:end].all()):
                broken.add(index)
                self._caches[:, :, slots[first:end]] = 0
            first = end
        return broken


def _row_ends(sequences: tuple[ScheduledSequence, ...]) -> list[int]:
    ends, total = [], 0
    for sequence in sequences:
        total += len(sequence.token_ids)
        ends.append(total)
    return ends
