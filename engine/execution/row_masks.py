"""The masks of a step's rows that have a grammar, worked out while the model computes."""

import numpy as np
from numpy.typing import NDArray

from engine.execution.runner import ModelLimits
from engine.grammar.allowed import Allowed
from engine.grammar.grammar_rows import GrammarRow, GrammarRows
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SchedulerOutput


class RowMasks:
    """Begun before the model runs and finished before a token is chosen, in every step."""

    def __init__(self, grammars: GrammarRows | None, limits: ModelLimits) -> None:
        self._grammars = grammars
        self._limits = limits
        # The row, its sampling and the length of its output, for each that was asked about.
        self._asked: list[tuple[int, SamplingParams, int]] = []

    def begin(self, work: SchedulerOutput) -> None:
        """Ask for what may come next in each sampled row with a grammar."""
        self._asked, rows = [], []
        for row, history in work.histories.items():
            spec = work.specs[row]
            grammar = spec.sampling.grammar
            if grammar is not None:
                output_ids = history[spec.num_prompt_tokens :]
                rows.append(GrammarRow(int(work.slots[row]), spec, grammar, output_ids))
                self._asked.append((row, spec.sampling, len(output_ids)))
        if rows:
            assert self._grammars is not None, "a grammar in a step of a runner that serves none"
            self._grammars.begin(rows)

    def finish(self) -> tuple[dict[int, NDArray[np.bool_]], dict[int, str]]:
        """By row, which tokens are possible, or why the sequence cannot go on."""
        masks: dict[int, NDArray[np.bool_]] = {}
        errors: dict[int, str] = {}
        if not self._asked or self._grammars is None:
            return masks, errors
        answers = self._grammars.finish()
        for (row, sampling, num_output_tokens), answer in zip(self._asked, answers, strict=True):
            if isinstance(answer, str):
                errors[row] = answer
            else:
                masks[row] = _mask(answer, sampling, num_output_tokens, self._limits)
        return masks, errors


def _mask(
    allowed: Allowed, sampling: SamplingParams, num_output_tokens: int, limits: ModelLimits
) -> NDArray[np.bool_]:
    """One bool per token, one of them true. What it says is told by `SamplingParams`."""
    bits = np.unpackbits(allowed.words.view(np.uint8), bitorder="little")[: limits.vocab_size]
    # A model may have more scores than its tokenizer has tokens.
    text = np.zeros(limits.vocab_size, np.bool_)
    text[: len(bits)] = bits
    stops = sorted(limits.eos_token_ids.union(sampling.stop_token_ids))
    mask = text.copy()
    mask[stops] = False
    wants_more = sampling.ignore_eos or num_output_tokens < sampling.min_tokens
    if mask.any() and (wants_more or not allowed.may_end):
        return mask
    if allowed.may_end:
        mask[stops] = True
        return mask
    return text
