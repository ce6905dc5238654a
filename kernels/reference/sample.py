"""Draws the next token of each row: temperature, top_k, top_p, min_p, Gumbel noise, argmax.

    t[v]   = (score[v] - best) / temperature
    token  = argmax over the tokens that the filters keep of t[v] + noise(seed, choice, position, v)

Shapes: scores [rows, vocab], settings [rows] each, tokens [rows] in int64. No operation mixes
rows. What the filters keep is told in `token_filters.py`, the noise in `gumbel_noise.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.gumbel_noise import gumbel_noise, noise_keys
from kernels.reference.token_filters import least_probability

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class RowSettings:
    """How each row's token is drawn; all are [rows] and lie on the device of the scores.

    float32: `temperature` (0 takes the largest score), `top_p` (1 keeps all), `min_p` (0 keeps
    all). int64: `top_k` (0 keeps all) and the noise's name, `seed`, `choice` and `position`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor

    def check(self, rows: int) -> None:
        """Every setting has one entry per row, of its dtype, side by side."""
        floats = (self.temperature, self.top_p, self.min_p)
        whole = (self.top_k, self.seed, self.choice, self.position)
        for tensors, dtype in ((floats, torch.float32), (whole, torch.int64)):
            for tensor in tensors:
                assert tensor.shape == (rows,), (tensor.shape, rows)
                assert tensor.dtype is dtype, (tensor.dtype, dtype)
                assert tensor.is_contiguous(), tensor.stride()


def sample(scores: Tensor, settings: RowSettings) -> Tensor:
    """One token per row; NO_TOKEN where a row has NaN or +inf, or no finite score."""
    settings.check(len(scores))
    scores = scores.float()
    best, token_ids = scores.max(dim=-1)
    is_greedy = settings.temperature == 0
    temperature = settings.temperature.masked_fill(is_greedy, 1.0)
    scores = (scores - best[:, None]) / temperature[:, None]
    probabilities = scores.softmax(dim=-1)
    vocab_size = scores.shape[-1]
    top_k = torch.where(settings.top_k > 0, settings.top_k, vocab_size).clamp(max=vocab_size)
    least = least_probability(probabilities, top_k, settings.top_p, settings.min_p)
    scores = scores.masked_fill(probabilities < least[:, None], float("-inf"))
    keys = noise_keys(settings.seed, settings.choice, settings.position)
    drawn = (scores + gumbel_noise(keys, vocab_size)).argmax(dim=-1)
    token_ids = torch.where(is_greedy, token_ids, drawn)
    return token_ids.masked_fill(~best.isfinite(), NO_TOKEN)
