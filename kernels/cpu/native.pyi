"""What the C++ extension offers; see src/module.cpp."""

from collections.abc import Mapping, Sequence

from torch import Tensor

def instruction_sets() -> list[str]:
    """Names of the instruction sets that this machine can run, the fastest first."""

class PackedLinear:
    """A projection's weight [outputs, inputs], laid out for the kernels.

    `weight_type` is "float32", "bfloat16" or "int8". A gated one is two projections, one below the
    other, whose outputs come as activation(first) x second.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, weight_type: str, is_gated: bool = False
    ) -> None: ...

class Step:
    """The rows of one step, as `engine.layers.step_layout` lays them out."""

    def __init__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        starts: Tensor,
        offsets: Tensor,
        block_tables: Tensor,
    ) -> None: ...

class Decoder:
    """A whole decoder; `half` 2 x layer is its attention, 2 x layer + 1 its MLP."""

    def __init__(
        self,
        shape: Mapping[str, float | int | str],
        embedding: Tensor,
        final_norm: Tensor,
        ropes: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[Mapping[str, object]],
        instruction_set: str = "",
    ) -> None: ...
    def run(self, step: Step, caches: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Last hidden states [tokens, hidden] of a step, and which of them are finite."""

    def begin(self, step: Step, caches: Tensor, block_size: int) -> None:
        """Start a step that goes on half by half."""

    def half(self, index: int) -> Tensor:
        """What this rank adds, [tokens, hidden] in float32."""

    def add(self, index: int, total: Tensor) -> None:
        """Add what all ranks add."""

    def end(self) -> tuple[Tensor, Tensor]:
        """As `run` returns it."""

    def logits(self, head: PackedLinear, hidden: Tensor, rows: Tensor) -> Tensor:
        """Scores [rows, vocabulary] in float32 of these rows; valid until the next call."""

    def attention(self, qkv: Tensor, step: Step, caches: Tensor, block_size: int) -> Tensor:
        """Layer 0 turns, stores and attends: qkv float32 [tokens, heads] to [tokens, heads]."""

def linear(packed: PackedLinear, x: Tensor, instruction_set: str = "") -> Tensor:
    """Project x [rows, inputs] to float32 [rows, outputs]; a gated one with SiLU."""

def sample(scores: Tensor, settings: Sequence[Tensor], instruction_set: str = "") -> Tensor:
    """Tokens of scores [rows, vocabulary], by the fields of `RowSettings`."""

def wipe(caches: Tensor, block_size: int, slots: Tensor) -> None:
    """Zero what the slots hold in all layers."""

def large_zeros(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Zeros in large memory pages, where the system has them."""
