"""RMS norm on GPUs, alone or together with the addition that comes before it in a decoder.

    sum  = x + residual                                    (add_rms_norm only)
    y    = sum / sqrt(mean(sum^2) + eps) * weight

Shapes: x, residual, y [rows, hidden], weight [hidden]. One program keeps one row in registers,
so nothing is read twice. Bytes moved, at e bytes an element: rms_norm 2 e rows hidden;
add_rms_norm 4 e rows hidden, where an addition and a norm apart move 5 e. The sum is rounded to
x's dtype before it is normalised, as two kernels would round it; the rest is float32.
"""

# mypy: allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0917 - a kernel's arguments are flat

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    hidden: int,
    eps: float,
    adds: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row. With `adds`, the sum takes the place of the residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < hidden
    values = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0)  # [block]
    if adds:
        place = residual + row * hidden + columns
        before = tl.load(place, mask=is_inside, other=0.0)  # [block]
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(place, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    gain = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)  # [block]
    tl.store(out + row * hidden + columns, wide * scale * gain, mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the rows of x [rows, hidden], which may lie apart; the result has x's dtype."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place, both [rows, hidden]; return the sum, normalised."""
    assert residual.shape == x.shape, (residual.shape, x.shape)
    assert residual.dtype is x.dtype, (residual.dtype, x.dtype)
    assert residual.is_contiguous(), residual.stride()
    return _launch(x, residual, weight, eps)


def num_norm_warps(block: int) -> int:
    """How many warps hold a row: 16 numbers in each thread, if that is possible."""
    return min(max(block // 512, 1), 16)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, hidden = x.shape
    assert x.stride(1) == 1, x.stride()
    assert weight.shape == (hidden,), (weight.shape, x.shape)
    assert weight.is_contiguous(), weight.stride()
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        rms_norm_kernel[(rows,)](
            x,
            out if residual is None else residual,
            weight,
            out,
            x.stride(0),
            hidden,
            eps,
            adds=residual is not None,
            block=block,
            num_warps=num_norm_warps(block),
        )
    return out
