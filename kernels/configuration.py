"""One Triton kernel as it is launched while serving: the types of its arguments, and its constants.

Configurations lie in `kernels/configurations/`, one file for a kernel file. Each file has one
function, which `ahead_of_time.py` finds by its name:

    def configurations(capability: int) -> Iterable[Configuration]

It lists what is launched on GPUs of that compute capability (80, 90 or 100), and leaves out what
is not: e4m3 below 90, say. Few and telling ones are enough: each takes a compiler a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """`types` and `constants` together name each argument of the kernel once.

    A type is Triton's: "*bf16" for a pointer to bfloat16 ("*fp32", "*i64", "*fp8e4nv", ...),
    "i32", "i64", "fp32", or "tensordesc<bf16[128, 64]>". Pointers are taken to be multiples of
    16 bytes; "i32:16" is a number that is a multiple of 16. A number that is 1, and a pointer
    that is None, are constants to Triton: put them there.

    With `uses_dot`, tensor core instructions are expected: on capability 90 `wgmma`, unless
    `has_low_tiles` says that products have less than the 64 rows which that needs.
    """

    name: str
    kernel: JITFunction
    types: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    uses_dot: bool = False
    has_low_tiles: bool = False

    def __post_init__(self) -> None:
        named = sorted([*self.types, *self.constants])
        assert named == sorted(self.kernel.arg_names), (self.name, named, self.kernel.arg_names)
