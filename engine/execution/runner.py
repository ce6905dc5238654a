"""What the engine asks of whatever computes: a real model, a scripted one, or several ranks."""

from dataclasses import dataclass
from typing import Protocol

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.scheduling.scheduler_output import SchedulerOutput

# Why a row with a PENDING token fails: the sequence failed in the step before, when this step
# was decided already.
UNKNOWN_TOKEN = "The token before this one was never sampled."  # noqa: S105 - a message


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must respect, and which tokens end an output by themselves."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Runner(Protocol):
    """Computes steps. KV lives behind it, in the slots that the block tables name."""

    @property
    def limits(self) -> ModelLimits:
        """The limits of the model that runs here."""

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        """Carry out the moves, then compute the rows; a step may have moves and no rows.

        One row's trouble is its error: what it wrote is wiped and no other row is touched. A
        token still PENDING is such trouble. An exception loses the replica.
        """
