"""How near a kernel is to float64, and that it wrote all that it returned."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

# Relative RMS errors of results that were rounded once to these dtypes.
BOUNDS = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, as a share of that of `expected`; NaN is infinite."""
    difference = (got.double() - expected).square().mean().sqrt()
    share = float(difference / expected.square().mean().sqrt())
    return float("inf") if math.isnan(share) else share


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that `torch.empty` gives inside is full of NaN, or of the least whole number."""
    with patch.object(torch, "empty", _full_of_poison):
        yield


def _full_of_poison(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.zeros(*size, device=device).fill_(math.nan).to(dtype)
    return torch.zeros(*size, dtype=dtype, device=device).fill_(torch.iinfo(dtype).min)
