"""What came out of one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.interface.token_logprobs import StepLogprobs

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class ModelRunnerOutput:
    """One result per row, in the order of the SchedulerOutput.

    `token_ids[r]` is the token sampled, NO_TOKEN where none was asked for or the row failed.
    `errors` says of each failed row why its sequence cannot go on; no other row is touched by
    it. `moves_s` is how many seconds the step's block moves took. `logprobs` is None when no
    row asked for any; rows that failed have none.
    """

    token_ids: NDArray[np.int64]
    errors: Mapping[int, str] = field(default_factory=dict)
    moves_s: float = 0.0
    logprobs: StepLogprobs | None = None
