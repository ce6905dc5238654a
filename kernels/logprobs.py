"""How likely the model found the tokens that were chosen, without writing any other logprob.

    y[r] = x[r, token[r]] - log(sum over v of exp(x[r, v]))

Shapes: logits x [rows, vocab], token ids [rows], y [rows] in float32. One program reads one row
once, with a running maximum and sum in every lane, as in an online softmax. Bytes moved, at e
bytes a logit: e rows vocab; log_softmax and a gather move three to four times that in float32.
A row with NaN or +inf, or without any finite logit, gives NaN.
"""

# mypy: allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def chosen_logprobs_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    out: tl.tensor,
    stride: int,
    vocab_size: int,
    block: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    lanes = tl.arange(0, block)
    # The lowest finite number, so that no lane ever subtracts -inf from -inf.
    largest = tl.full((block,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, vocab_size, block):
        columns = start + lanes
        is_inside = columns < vocab_size
        x = tl.load(own + columns, mask=is_inside, other=float("-inf")).to(tl.float32)  # [block]
        higher = tl.where(x > largest, x, largest)
        total = total * tl.exp(largest - higher) + tl.exp(x - higher)
        largest = higher
    top = tl.max(largest, axis=0)
    mass = tl.sum(total * tl.exp(largest - top), axis=0)
    chosen = tl.load(own + tl.load(token_ids + row)).to(tl.float32)
    # NaN and +inf have made the mass NaN; without any finite logit it is 0.
    tl.store(out + row, tl.where(mass > 0, chosen - top - tl.log(mass), float("nan")))


def chosen_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logprobs [rows] in float32 of token_ids, int64 [rows], under logits [rows, vocab]."""
    rows, vocab_size = logits.shape
    assert token_ids.shape == (rows,), (token_ids.shape, logits.shape)
    assert token_ids.dtype is torch.int64, token_ids.dtype
    assert token_ids.is_contiguous(), token_ids.stride()
    assert logits.stride(1) == 1, logits.stride()
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        chosen_logprobs_kernel[(rows,)](
            logits, token_ids, out, logits.stride(0), vocab_size, block=_BLOCK, num_warps=16
        )
    return out
