"""What sampling means, one row at a time in float64, as SamplingParams tells it."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import SequenceSpec
from kernels.reference.gumbel_noise import gumbel_noise, noise_key

Floats = NDArray[np.float64]


def edited_scores(
    logits: Floats, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Bias, then the repetition penalty, then those on what the output holds."""
    scores = logits.copy()
    for token_id, bias in sampling.logit_bias:
        scores[token_id] += bias
    for token_id in {*prompt, *output}:
        score = scores[token_id]
        penalty = sampling.repetition_penalty
        scores[token_id] = score / penalty if score > 0 else score * penalty
    for token_id, count in Counter(output).items():
        scores[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def kept_probabilities(scores: Floats, sampling: SamplingParams) -> Floats:
    """What a token is drawn with: temperature, top_k, top_p, min_p, renormalised."""
    exponents = np.exp((scores - scores.max()) / sampling.temperature)
    likely = exponents / exponents.sum()
    kept = likely.copy()
    if sampling.top_k > 0:
        kept[kept < np.sort(kept)[::-1][min(sampling.top_k, len(kept)) - 1]] = 0
    if sampling.top_p < 1:
        ordered = np.sort(kept / kept.sum())[::-1]
        mass_before = np.cumsum(ordered) - ordered
        least = ordered[mass_before < sampling.top_p].min()
        kept[kept / kept.sum() < least] = 0
    kept[kept < sampling.min_p * likely.max()] = 0
    probabilities: Floats = kept / kept.sum()
    return probabilities


def reference_token(
    logits: Floats, spec: SequenceSpec, history: Sequence[int], end_ids: frozenset[int]
) -> int:
    """The token that follows `history`, prompt first."""
    sampling, length = spec.sampling, spec.num_prompt_tokens
    scores = edited_scores(logits, sampling, history[:length], history[length:])
    if len(history) - length < sampling.min_tokens:
        eos = frozenset() if sampling.ignore_eos else end_ids
        scores[sorted({*eos, *sampling.stop_token_ids})] = -np.inf
    if sampling.temperature <= 1e-3 or sampling.top_k == 1 or sampling.top_p <= 1e-3:
        return int(scores.argmax())
    kept = kept_probabilities(scores, sampling)
    key = torch.tensor([noise_key(sampling.seed, spec.choice, len(history))], dtype=torch.int32)
    noise = gumbel_noise(key, len(logits))[0].double().numpy()
    with np.errstate(divide="ignore"):
        return int((np.log(kept) + noise).argmax())
