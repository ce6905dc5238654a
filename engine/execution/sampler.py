"""Chooses the next token of every row that wants one.

Rows are independent: no operation here mixes them, and chance comes from noise named by
(seed, choice, position, token id), so a row's token does not depend on its neighbours, on
its place in the batch or on the batch's size. What is done to scores, and in which order, is
told by `SamplingParams`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.model_runner_output import NO_TOKEN
from engine.execution.sampling_table import SamplingTable, Settings
from engine.execution.token_logprobs import token_logprobs
from engine.interface.token_logprobs import TokenLogprob
from engine.scheduling.scheduler_output import SequenceSpec
from kernels.dispatch import sample
from kernels.reference.sample import RowSettings
from kernels.reference.score_penalties import penalise_presence, penalise_repetition


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Who wants a token: sequences, their slots, and where the new token will stand in each.

    `histories[i]` holds all tokens before it, for the rows whose scores depend on them.
    `allowed[i]` says of each token whether it may come, for the rows with a grammar.
    """

    specs: Sequence[SequenceSpec]
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    histories: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    allowed: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)


class Sampler:
    """One call per step. Remembers nothing of a sequence but its settings."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._table = SamplingTable()

    def sample(
        self, logits: Tensor, rows: SampledRows
    ) -> tuple[NDArray[np.int64], dict[int, TokenLogprob]]:
        """One token per row of logits [rows, vocab]; NO_TOKEN where a row has no finite scores.

        Also the logprobs of those that asked for them. `logits` is left as it is.
        """
        settings = self._table.settings(rows.specs, rows.slots)
        raw = logits.float()
        scores = self._edited(raw, rows, settings)
        token_ids = sample(scores, _row_settings(settings, rows.positions))
        sampled: NDArray[np.int64] = token_ids.numpy()
        told = np.flatnonzero((settings["num_top"] >= 0) & (sampled != NO_TOKEN))
        if not told.size:
            return sampled, {}
        num_top = settings["num_top"][told].tolist()
        entries = token_logprobs(_rows(raw, told), sampled[told], num_top)
        return sampled, dict(zip(told.tolist(), entries, strict=True))

    def _edited(self, raw: Tensor, rows: SampledRows, settings: Settings) -> Tensor:
        """The scores after mask, bias, penalties and forbidden ends; the same tensor if none apply.

        Few rows have any of these, and what they ask for differs in length: one by one.
        """
        is_bound = rows.positions < settings["free_from"]
        is_edited = settings["is_edited"] | is_bound
        masked = list(rows.allowed)
        # A grammar's mask has thought of the ends already.
        is_bound[masked], is_edited[masked] = False, True
        edited = np.flatnonzero(is_edited).tolist()
        if not edited:
            return raw
        scores = raw.clone()
        for row in edited:
            spec = rows.specs[row]
            if row in rows.allowed:
                _mask(scores[row], rows.allowed[row])
            _bias_and_penalise(scores[row], spec, rows.histories.get(row))
            if is_bound[row]:
                eos = frozenset() if spec.sampling.ignore_eos else self._eos_token_ids
                scores[row, sorted(eos.union(spec.sampling.stop_token_ids))] = float("-inf")
        return scores


def _mask(scores: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Make tokens impossible, but hide no score that is not finite: the row is broken then."""
    is_out = ~torch.from_numpy(allowed).to(scores.device)
    scores.masked_fill_(is_out & scores.isfinite(), float("-inf"))


def _bias_and_penalise(
    scores: Tensor, spec: SequenceSpec, history: NDArray[np.int64] | None
) -> None:
    sampling = spec.sampling
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        scores[list(token_ids)] += torch.tensor(biases, dtype=torch.float32, device=scores.device)
    if not sampling.is_penalised:
        return
    assert history is not None, f"the step does not say what {spec.request_id} has said"
    said = torch.from_numpy(history).to(scores.device)
    if sampling.repetition_penalty != 1:
        penalise_repetition(scores, said, sampling.repetition_penalty)
    penalise_presence(
        scores,
        said[spec.num_prompt_tokens :],
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def _row_settings(settings: Settings, positions: NDArray[np.int64]) -> RowSettings:
    def column(name: str) -> Tensor:
        return torch.from_numpy(settings[name].copy())

    return RowSettings(
        column("temperature"),
        column("top_k"),
        column("top_p"),
        column("min_p"),
        column("seed"),
        column("choice"),
        torch.from_numpy(positions),
    )


def _rows(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """These rows; the tensor itself when that is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows)]
