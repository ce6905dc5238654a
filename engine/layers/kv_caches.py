"""The KV cache of all layers, as one piece of memory.

[layers, 2 x kv_heads, num_blocks x block_size, head_dim]: keys of every head, then values. A
block of one head is one run of numbers; what lies where inside it is up to the decoder that
writes and reads it, and blocks are copied whole.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVCaches:
    """It holds finite numbers only: attention masks stale places but still multiplies them."""

    tensor: Tensor
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.tensor.shape[2] // self.block_size
