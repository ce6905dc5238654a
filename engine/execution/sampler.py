"""Chooses the next token of every row that wants one.

Rows are independent: no operation here mixes them, and chance comes from noise named by
(seed, choice, position, token id), so a row's token does not depend on its neighbours, on
its place in the batch or on the batch's size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.model_runner_output import NO_TOKEN
from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SequenceSpec
from kernels.reference.gumbel_noise import gumbel_noise, noise_key

# Nucleus and top-k almost always end within this many most likely tokens; where they do not,
# the whole vocabulary is sorted.
_HEAD = 1024


def sample(
    logits: Tensor,
    specs: Sequence[SequenceSpec],
    positions: NDArray[np.int64],
    eos_token_ids: frozenset[int],
) -> NDArray[np.int64]:
    """One token per row of logits [rows, vocab]; NO_TOKEN where a row has no finite scores.

    `positions[r]` is where the row's new token will stand in its sequence.
    """
    logits = logits.to(torch.float32, copy=True)
    ends = positions.tolist()
    _forbid_early_ends(logits, specs, ends, eos_token_ids)
    # The largest score is finite exactly if the row has no NaN, no +inf, and any score at all.
    is_healthy = logits.amax(dim=-1).isfinite()
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, spec in enumerate(specs) if not spec.sampling.is_greedy]
    if drawn:
        chosen = [specs[row] for row in drawn]
        token_ids[drawn] = _draw(logits[drawn], chosen, [ends[row] for row in drawn])
    sampled: NDArray[np.int64] = token_ids.where(is_healthy, NO_TOKEN).numpy()
    return sampled


def _forbid_early_ends(
    logits: Tensor,
    specs: Sequence[SequenceSpec],
    positions: list[int],
    eos_token_ids: frozenset[int],
) -> None:
    for row, (spec, position) in enumerate(zip(specs, positions, strict=True)):
        sampling = spec.sampling
        if position - spec.num_prompt_tokens < sampling.min_tokens:
            eos = frozenset() if sampling.ignore_eos else eos_token_ids
            logits[row, sorted(eos.union(sampling.stop_token_ids))] = float("-inf")


def _draw(logits: Tensor, specs: Sequence[SequenceSpec], positions: list[int]) -> Tensor:
    """Temperature, then top_k, top_p and min_p, then the largest of score plus Gumbel noise."""
    samplings = [spec.sampling for spec in specs]
    scores = logits / torch.tensor([sampling.temperature for sampling in samplings])[:, None]
    if any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in samplings):
        probabilities = scores.softmax(dim=-1)
        floor = _least_probability(probabilities, samplings)
        scores.masked_fill_(probabilities < floor[:, None], float("-inf"))
    keys = [
        noise_key(spec.sampling.seed, spec.choice, position)
        for spec, position in zip(specs, positions, strict=True)
    ]
    noise = gumbel_noise(torch.tensor(keys, dtype=torch.int32), scores.shape[-1])
    return (scores + noise).argmax(dim=-1)


def _least_probability(probabilities: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Per row, the probability of the least likely token that top_k, top_p and min_p keep."""
    min_p = torch.tensor([sampling.min_p for sampling in samplings])
    floor = probabilities.amax(dim=-1) * min_p
    cut = [row for row, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1]
    if not cut:
        return floor
    vocab_size = probabilities.shape[-1]
    top_k = torch.tensor([min(samplings[row].top_k or vocab_size, vocab_size) for row in cut])
    top_p = torch.tensor([samplings[row].top_p for row in cut])
    head = probabilities[cut].topk(min(_HEAD, vocab_size), dim=-1).values
    least, is_final = _least_kept(head, top_k, top_p, vocab_size)
    for i in (~is_final).nonzero().flatten().tolist():
        ordered = probabilities[cut[i]].sort(descending=True).values[None]
        least[i] = _least_kept(ordered, top_k[i : i + 1], top_p[i : i + 1], vocab_size)[0][0]
    floor[cut] = torch.maximum(floor[cut], least)
    return floor


def _least_kept(
    ordered: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """What top_k, then top_p keep of probabilities [rows, width] in falling order.

    Returns the smallest kept value per row, and whether looking beyond `width` could not
    change it. Tokens as likely as the last one kept are kept too, so order among equals
    decides nothing.
    """
    width = ordered.shape[-1]
    kth = ordered.gather(-1, (top_k.clamp(max=width) - 1)[:, None])
    is_kept = ordered >= kth
    mass = torch.where(is_kept, ordered, 0.0).cumsum(dim=-1)
    has_top_k = top_k < vocab_size
    # After top_k the rest is renormalised; without it the whole row sums to 1.
    total = torch.where(has_top_k, mass[:, -1], 1.0)
    before = mass - ordered
    is_kept &= (before < (top_p * total)[:, None]) | (top_p >= 1)[:, None]
    least = torch.where(is_kept, ordered, 1.0).amin(dim=-1)
    is_final = (top_k <= width) | ~is_kept[:, -1]
    return least, is_final
