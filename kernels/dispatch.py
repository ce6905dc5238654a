"""Chooses among the twins of an operator: by where its numbers lie, and by what was built.

on a GPU     kernels/            Triton
on a CPU     kernels/cpu/        C++, if it was built
otherwise    kernels/reference/  torch's own operators, the definition of what is right
"""

from torch import Tensor

from kernels.cpu.extension import extension
from kernels.reference.sample import RowSettings
from kernels.reference.sample import sample as sample_by_torch


def sample(scores: Tensor, settings: RowSettings) -> Tensor:
    """One token per row of float32 scores [rows, vocab], or NO_TOKEN; see reference/sample.py."""
    if scores.is_cuda:
        # Triton looks for a GPU as it is imported, and takes its time.
        from kernels.sample import sample as sample_by_triton  # noqa: PLC0415

        return sample_by_triton(scores, settings)
    native = extension()
    if native is None:
        return sample_by_torch(scores, settings)
    settings.check(len(scores))
    token_ids: Tensor = native.sample(
        scores.contiguous(),
        [
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.seed,
            settings.choice,
            settings.position,
        ],
    )
    return token_ids
