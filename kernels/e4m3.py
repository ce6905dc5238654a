"""Rounding to e4m3, the eight-bit float of weights, activations and caches, inside a kernel.

A number has a sign, four bits of exponent and three behind the first; the largest is 448, the
least above zero 2^-9. Converting what is rounded already is exact, whatever does it.
"""

# mypy: allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def round_to_e4m3(x: tl.tensor) -> tl.tensor:
    """The nearest e4m3 numbers of x in float32, halves to even, still in float32.

    What lies beyond the largest becomes the largest; NaN stays what it is. From 2^-6 up, 3 of 23
    bits after the first stay: adding half of the last one, or a little less where it is 0, carries
    as rounding does. Below, steps are 2^-9, the last places of a sum with 1.5 x 2^14.
    """
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    # Only NaN differs from itself, and its bits may have been carried out of the number.
    return tl.where(x == x, rounded, x)  # noqa: PLR0124
