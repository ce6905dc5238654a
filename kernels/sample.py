"""Draws the next token of each row: temperature, top_k, top_p, min_p, Gumbel noise, argmax.

    t[v]   = (score[v] - best) / temperature                                    in (-inf, 0]
    kept   = v is one of the top_k; of these, in the top_p of their mass; exp(t[v]) >= min_p
    token  = argmax over kept v of  t[v] - log(-log(1 - u(seed, choice, position, v)))

Shapes: scores [rows, vocab], settings [rows] each, tokens [rows] in int64. Rows do not know of
each other: one program reads one row, several times, from L2 after the first. A temperature of 0
takes the largest score, the first of equals. A row with NaN or +inf, or without any finite
score, gives -1. Penalties, biases and masks have been applied before.

Nothing is sorted. A row keeps what is above a threshold, so that:

    top_k   the k-th largest t is found digit by digit, as an integer: -t is not negative, so its
            bits are in the order of its value. Four passes count digits of 8 bits.
    top_p   a token is drawn from all; it was to be drawn if the mass above it is less than
            top_p. If not, neither it nor any less likely one is kept: the next draw is among
            those above it, with the same noise. The result is that of cutting first, and after
            n draws about 1 - 2^-n of the mass is cut.

Bytes moved, at e bytes a score: e rows vocab once for greedy rows, twice for plain ones; filtered
rows read 2 + 4 (top_k) + 2 per draw (top_p) times. Sums are float32 in an order that depends on the
vocabulary alone. The noise is that of `reference/gumbel_noise.py`, hash for hash.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917 - a kernel's arguments are flat

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.sample import RowSettings

_BLOCK = 4096


@triton.jit
def sample_kernel(
    scores: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    stride: int,
    vocab_size: int,
    block: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * stride
    best, token = _largest(own, vocab_size, block)
    temperature = tl.load(temperatures + row)
    is_sound = (best > float("-inf")) & (best < float("inf"))
    if is_sound & (temperature > 0):
        key_a, key_b = _noise_key(
            tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
        )
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        last_rank = 0x7F800000
        if (top_k > 0) & (top_k < vocab_size):
            last_rank = _rank_of_kth(own, best, temperature, top_k, vocab_size, block)
        min_p = tl.load(min_ps + row)
        total = -1.0
        is_open = True
        while is_open:
            rank, token, mass = _draw(
                own, best, temperature, min_p, last_rank, key_a, key_b, vocab_size, block
            )
            # The first draw is among all that top_p may keep.
            total = tl.where(total < 0, mass, total)
            # The likeliest token's rank is 0, and it is always kept.
            is_open = (top_p < 1) & (rank > 0)
            if is_open:
                above = _mass_above(own, best, temperature, rank, vocab_size, block)
                is_open = above >= top_p * total
            last_rank = rank - 1
    tl.store(tokens + row, tl.where(is_sound, token, -1).to(tl.int64))


@triton.jit
def _largest(own: tl.tensor, vocab_size: int, block: tl.constexpr) -> tl.tensor:
    """The largest score and the first place that has it; +inf if any score is NaN."""
    lanes = tl.arange(0, block)
    best = tl.full((block,), float("-inf"), tl.float32)
    place = lanes
    for start in range(0, vocab_size, block):
        columns = start + lanes
        x = tl.load(own + columns, mask=columns < vocab_size, other=float("-inf"))  # [block]
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - only NaN differs from itself
        place = tl.where(x > best, columns, place)
        best = tl.maximum(best, x)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, place, vocab_size), axis=0)


@triton.jit
def _ranks(
    own: tl.tensor, best: tl.tensor, temperature: tl.tensor, columns: tl.tensor, vocab_size: int
) -> tl.tensor:
    """t of these columns, and -t as integers in the same order: 0 is the likeliest."""
    x = tl.load(own + columns, mask=columns < vocab_size, other=float("-inf"))  # [block]
    # From the largest down, so that a small temperature overflows to -inf only.
    below = (best - x.to(tl.float32)) / temperature
    return -below, below.to(tl.int32, bitcast=True)


@triton.jit
def _rank_of_kth(
    own: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    vocab_size: int,
    block: tl.constexpr,
) -> tl.tensor:
    """The rank of the k-th likeliest token, found from its highest digit to its lowest."""
    lanes = tl.arange(0, block)
    digits = tl.arange(0, 256)
    wanted = top_k.to(tl.int32)
    found = wanted * 0
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, vocab_size, block):
            columns = start + lanes
            _, rank = _ranks(own, best, temperature, columns, vocab_size)
            # Ranks have 31 bits: what stands above the highest digit is 0.
            matches = (columns < vocab_size) & ((rank >> shift) >> 8 == found)
            counts += tl.histogram((rank >> shift) & 255, 256, mask=matches)
        # The first digit by which as many are reached as are wanted.
        reached = tl.cumsum(counts, axis=0)
        digit = tl.sum((reached < wanted).to(tl.int32), axis=0)
        wanted -= tl.sum(tl.where(digits < digit, counts, 0), axis=0)
        found = (found << 8) | digit
    return found


@triton.jit
def _draw(
    own: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    last_rank: tl.tensor,
    key_a: tl.tensor,
    key_b: tl.tensor,
    vocab_size: int,
    block: tl.constexpr,
) -> tl.tensor:
    """The rank and the id of the token drawn among ranks 0 .. last_rank, and their mass."""
    lanes = tl.arange(0, block)
    highest = tl.full((block,), float("-inf"), tl.float32)
    place = lanes
    mass = tl.zeros((block,), tl.float32)
    for start in range(0, vocab_size, block):
        columns = start + lanes
        t, rank = _ranks(own, best, temperature, columns, vocab_size)
        weight = tl.where(rank <= last_rank, tl.exp(t), 0.0)
        mass += weight
        perturbed = t + _gumbel_noise(columns, key_a, key_b)
        perturbed = tl.where((rank <= last_rank) & (weight >= min_p), perturbed, float("-inf"))
        is_higher = perturbed > highest
        place = tl.where(is_higher, columns, place)
        highest = tl.where(is_higher, perturbed, highest)
    top = tl.max(highest, axis=0)
    token = tl.min(tl.where(highest == top, place, vocab_size), axis=0)
    _, rank = _ranks(own, best, temperature, token, vocab_size)
    return rank, token, tl.sum(mass, axis=0)


@triton.jit
def _mass_above(
    own: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    rank: tl.tensor,
    vocab_size: int,
    block: tl.constexpr,
) -> tl.tensor:
    """The mass of all tokens likelier than those of this rank."""
    lanes = tl.arange(0, block)
    mass = tl.zeros((block,), tl.float32)
    for start in range(0, vocab_size, block):
        t, ranks = _ranks(own, best, temperature, start + lanes, vocab_size)
        mass += tl.where(ranks < rank, tl.exp(t), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _noise_key(seed: tl.tensor, choice: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Two 32-bit words from the name of a draw."""
    a = seed.to(tl.uint32)
    b = (seed >> 32).to(tl.uint32)
    for step in tl.static_range(4):
        if step == 0:
            word = choice.to(tl.uint32)
        elif step == 1:
            word = position.to(tl.uint32)
        elif step == 2:
            word = tl.full((), 0x52, tl.uint32)
        else:
            word = tl.full((), 0x1D, tl.uint32)
        a = _mix(a + word * 0x9E3779B1, 0)
        b = _mix((b ^ a) + 0x9E3779B1, 0)
    return a, b


@triton.jit
def _mix(word: tl.tensor, key: tl.tensor) -> tl.tensor:
    """The hash of 32-bit words; `key` enters half-way."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = word ^ key
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _gumbel_noise(columns: tl.tensor, key_a: tl.tensor, key_b: tl.tensor) -> tl.tensor:
    """-log(-log(1 - u)), accurate for the smallest u: those are the largest draws."""
    bits = _mix(columns.to(tl.uint32) * 0x9E3779B1 + key_a, key_b)
    u = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    u = tl.minimum(u, 0.9999999403953552)
    # log(1 - u) = -2 artanh(u / (2 - u)); below 1/2 a few terms of its series are exact in
    # float32, where 1 - u would have lost u's digits. From there on 1 - u is exact.
    z = u / (2.0 - u)
    s = z * z
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s / 13)))))
    exponential = tl.where(u < 0.5, 2.0 * z * series, -tl.log(1.0 - u))
    return -tl.log(exponential)


def sample(scores: Tensor, settings: RowSettings) -> Tensor:
    """One token per row of scores [rows, vocab], or -1; see `reference/sample.py`."""
    rows, vocab_size = scores.shape
    assert scores.stride(1) == 1, scores.stride()
    settings.check(rows)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        sample_kernel[(rows,)](
            scores,
            tokens,
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.seed,
            settings.choice,
            settings.position,
            scores.stride(0),
            vocab_size,
            block=min(_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=16,
        )
    return tokens
