"""Shapes of models with random weights: nothing is loaded, and speed does not read words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama-family decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rope_theta: float = 500_000.0
    eps: float = 1e-5

    @property
    def kv_width(self) -> int:
        """Numbers that a token leaves in one layer's cache."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Outputs of the fused projection."""
        return self.heads * self.head_dim + self.kv_width

    @property
    def weights_per_layer(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = self.hidden * (self.qkv_width + self.heads * self.head_dim)
        return attention + 3 * self.hidden * self.intermediate


LLAMA_3_8B = LlamaShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab_size=128256,
)
TINY = LlamaShape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab_size=259
)
