"""Noise that depends on nothing but its name: (seed, choice, position, token id).

Adding Gumbel noise to logits and taking the largest draws from their softmax. The noise is a
hash, not the state of a generator, so a token drawn does not depend on what was computed
before it, beside it, or where.

    key   two 32-bit words, mixed from seed (64 bits), choice and position
    h     = mix(token x odd + key.a, key.b)                         32 bits
    E     = -log(1 - (h mod 2^31 + 1/2) / 2^31)      exponentially distributed
    noise = -log E

The hash is 32-bit arithmetic modulo 2^32. Here it runs in int32, whose products wrap and
whose right shifts are masked to drop the sign, bit for bit what uint32 gives.
"""

import torch
from torch import Tensor

_TOKEN_STRIDE = 0x9E3779B1
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_WORD = 0xFFFFFFFF


def noise_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Mix the name of a draw into two 32-bit words, given as signed int32 values."""
    a, b = seed & _WORD, seed >> 32
    for word in (choice, position, 0x52, 0x1D):
        a = _mix((a + word * _TOKEN_STRIDE) & _WORD)
        b = _mix((b ^ a) + _TOKEN_STRIDE & _WORD)
    return _signed(a), _signed(b)


def noise_keys(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """The keys [rows, 2] in int32 of many draws at once, named by int64 tensors [rows].

    Products wrap modulo 2^64, which leaves the 32 bits that are kept as they are.
    """
    a, b = seeds & _WORD, seeds >> 32
    for word in (choices, positions, 0x52, 0x1D):
        a = _mix_all((a + word * _TOKEN_STRIDE) & _WORD)
        b = _mix_all((b ^ a) + _TOKEN_STRIDE & _WORD)
    return torch.stack((a, b), dim=-1).to(torch.int32)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Noise [rows, vocab_size] in float32 for keys [rows, 2] in int32."""
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = tokens * _signed(_TOKEN_STRIDE)
    bits = bits + keys[:, :1]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _signed(_FIRST)
    bits ^= keys[:, 1:]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _signed(_SECOND)
    bits ^= (bits >> 16) & 0xFFFF
    uniform = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    # Rounding may give exactly 1, whose noise would be -inf: a lone candidate must not lose.
    uniform.clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(word: int) -> int:
    word = ((word ^ word >> 16) * _FIRST) & _WORD
    word = ((word ^ word >> 15) * _SECOND) & _WORD
    return word ^ word >> 16


def _mix_all(words: Tensor) -> Tensor:
    words = ((words ^ words >> 16) * _FIRST) & _WORD
    words = ((words ^ words >> 15) * _SECOND) & _WORD
    return words ^ words >> 16


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
