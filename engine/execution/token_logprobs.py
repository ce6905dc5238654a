"""Turns scores into logprobs, as plain values: of sampled tokens and of prompt tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.token_logprobs import LEAST_LOGPROB, MAX_LOGPROBS, TokenLogprob

# Prompt positions scored at once: a chunk's scores over a whole vocabulary would fill memory.
_PIECE = 64


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """What the model thought of each row's token, by its scores [rows, vocab] as they came.

    `num_top[r]` likeliest tokens are listed beside it, or all there are.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    logprobs = logprobs.nan_to_num_(nan=LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)
    chosen = logprobs.gather(-1, torch.from_numpy(token_ids).to(logits.device)[:, None])
    plain: list[float] = chosen.flatten().tolist()
    if not any(num_top):
        return [TokenLogprob(logprob) for logprob in plain]
    # Always of the same width, so that which of some equals are listed depends on the row alone.
    top, ids = _in_order(*logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1))
    return [
        TokenLogprob(logprob, tuple(own_ids[:count]), tuple(own_top[:count]))
        for logprob, own_ids, own_top, count in zip(
            plain, ids.tolist(), top.tolist(), num_top, strict=True
        )
    ]


def prompt_logprobs(
    logits_of: Callable[[int, int], Tensor],
    targets: NDArray[np.int64],
    num_top: int,
) -> tuple[TokenLogprob, ...] | None:
    """What the model thought of each prompt token, by the scores of what follows the one before.

    `logits_of(a, b)` are the scores [b - a, vocab] of targets a .. b - 1. None if any scores are
    not finite.
    """
    entries: list[TokenLogprob] = []
    for start in range(0, len(targets), _PIECE):
        piece = targets[start : start + _PIECE]
        logits = logits_of(start, start + len(piece))
        if not bool(logits.amax(dim=-1).isfinite().all()):
            return None
        entries += token_logprobs(logits, piece, [num_top] * len(piece))
    return tuple(entries)


def _in_order(logprobs: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest first, equals by their ids."""
    token_ids, order = token_ids.sort(dim=-1)
    logprobs, by_value = logprobs.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return logprobs, token_ids.gather(-1, by_value)
