"""The driver's side of several ranks, without any."""

import pytest

from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.ranks.follower_process import RankLost
from engine.execution.ranks.ranked_execution import RankedExecution
from engine.execution.runner import ModelLimits
from engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.steps import Row, spec, step


class FailsOnce:
    limits = ModelLimits(10, 10, frozenset({0}))

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if self.num_steps == 1:
            raise MemoryError("no memory for this step")
        return ModelRunnerOutput(work.token_ids)


def test_after_an_error_of_the_driver_no_step_is_computed_by_parted_ranks() -> None:
    runner = FailsOnce()
    execution = RankedExecution(runner, 4, [])
    work = step(Row(spec(), (1,), 0, (1,)))
    execution.start(work)
    with pytest.raises(MemoryError, match="no memory"):
        execution.finish()
    execution.start(work)
    with pytest.raises(RankLost, match="parted by an error"):
        execution.finish()
    assert runner.num_steps == 1
    execution.close()
