"""Builds the kernels for CPUs, `kernels.cpu.native`. Everything else is in pyproject.toml.

They are optional: without a C++ compiler the install goes through, and torch's own operators do
the work (`kernels/cpu/__init__.py` says so once). One binary serves every CPU of an architecture,
for it chooses among its instruction sets when it is loaded.
"""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# They are compiled and linked in the order of their names. What several have in common, such as
# the standard library's templates, is taken from the first, which must run everywhere.
SOURCES = ("module", "portable", "team", "wide_avx2", "wide_avx512")
FLAGS = ["-O3", "-g0", "-std=c++20", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]


class OptionalBuild(BuildExtension):
    """A build that may fail."""

    def build_extensions(self) -> None:
        """Build, or say why not."""
        try:
            super().build_extensions()
        except Exception as error:  # noqa: BLE001 - whatever is amiss with the compiler
            self.warn(f"The CPU kernels were not built: {error}")


setup(
    ext_modules=[
        CppExtension(
            "kernels.cpu.native",
            [f"kernels/cpu/src/{name}.cpp" for name in SOURCES],
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
    cmdclass={"build_ext": OptionalBuild},
)
