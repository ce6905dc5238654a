"""y = x W^T + b, with the weight laid out once for the machine it runs on.

On CPUs oneDNN multiplies about twice as fast from its own blocked layout, in bfloat16 and in
float32 alike, so the weight is reordered at load and the original is dropped.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.reference.int8_linear import int8_linear, quantise_int8

# As the kernels for CPUs have it.
_INPUTS_PER_SCALE = 64


class Linear:
    """A fixed projection from in_features to out_features: weight [out, in], bias [out].

    With `is_int8` it multiplies in int8, as `kernels/reference/int8_linear.py` defines it.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False
    ) -> None:
        self._bias = bias
        self._scales: Tensor | None = None
        self._is_packed = not is_int8 and _can_pack(weight)
        if is_int8:
            self._weight, self._scales = quantise_int8(weight)
        elif self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Project x [rows, in] to [rows, out]."""
        if self._scales is not None:
            return int8_linear(x, self._weight, self._scales, self._bias, _INPUTS_PER_SCALE)
        if self._is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return packed
        return functional.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
