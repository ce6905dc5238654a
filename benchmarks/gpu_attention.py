"""Keys, values and attention of the measured model: torch's own, over a cache in one piece.

Sequences stand side by side, all with the same number of tokens, as a benchmark has them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_kernels import Place
from benchmarks.gpu_shape import LlamaShape
from kernels.reference.rope import apply_rope, rope_tables

# Layer and its qkv [tokens, qkv_width] in, attended [tokens, heads x head_dim] out.
Attend = Callable[[int, Tensor], Tensor]


class DenseCache:
    """Room for so many sequences of so many tokens: [layers, 2, sequences, kv_heads, tokens, d]."""

    def __init__(self, shape: LlamaShape, place: Place, sequences: int, tokens: int) -> None:
        self._shape = shape
        self._kv = torch.zeros(
            (shape.layers, 2, sequences, shape.kv_heads, tokens, shape.head_dim),
            dtype=place.dtype,
            device=place.device,
        )
        pairs = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        tables = rope_tables(shape.rope_theta**-pairs, tokens)
        self._cos, self._sin = (table.to(place.device, place.dtype) for table in tables)

    def attention(self, sequences: int, context: int, new_tokens: int) -> Attend:
        """How the new tokens of so many sequences are stored, and what they see."""
        shape, last = self._shape, context + new_tokens
        cos, sin = (table[context:last].repeat(sequences, 1, 1) for table in (self._cos, self._sin))
        visible = torch.ones(new_tokens, last, dtype=torch.bool, device=cos.device).tril(context)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(len(qkv), -1, shape.head_dim)
            turned = apply_rope(heads[:, : -shape.kv_heads].contiguous(), cos, sin)
            query, new_keys, new_values = (
                part.reshape(sequences, new_tokens, -1, shape.head_dim).transpose(1, 2)
                for part in (
                    turned[:, : shape.heads],
                    turned[:, shape.heads :],
                    heads[:, -shape.kv_heads :],
                )
            )
            keys, values = self._kv[layer][:, :sequences, :, :last]
            keys[:, :, context:] = new_keys
            values[:, :, context:] = new_values
            out = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=visible, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(len(qkv), -1)

        return attend
