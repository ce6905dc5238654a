"""What the engine asks of whatever computes: a real model, a scripted one, or several ranks."""

from dataclasses import dataclass
from typing import Protocol

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.scheduling.scheduler_output import SchedulerOutput


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

        No token is PENDING any more. One row's trouble is its error: what it wrote is wiped and
        no other row is touched. An exception loses the replica.
        """
