"""Computes steps on several ranks, of which this process is the first: the driver.

    start(step) ─▶ execution thread ─┬─ frame ─▶ follower 1: layers ──┐ sums, twice a layer
                                     ├─ frame ─▶ follower 2: layers ──┤
                                     └────────▶ driver:     layers ───┴─▶ words

A step travels as one frame through a socket to each follower, not as a collective: gloo would
have to be told every shape first, an idle follower would sit in a broadcast that times out, and a
socket says at once that the other side is gone. Collectives carry only what the layers add.

A lost rank ends it all, even while the driver waits in a sum for a rank that is no more:
`finish` then raises RankLost and the thread is left behind.
"""

from collections.abc import Callable, Sequence

from engine.execution.execution import ThreadedExecution
from engine.execution.model_runner_output import ModelRunnerOutput
from engine.execution.ranks.follower_process import FollowerProcess, RankLost
from engine.execution.ranks.rank_step import encode
from engine.execution.ranks.rank_watch import RankWatch
from engine.execution.runner import Runner
from engine.scheduling.scheduler_output import SchedulerOutput

# A broken sum is an error on the driver's side before the watch has seen why.
_REASON_LIMIT_S = 0.5


class RankedExecution:
    """An Execution on a thread of its own; the followers end with it.

    `on_loss` is called once, on another thread, if a rank is lost; by default that shows only in
    the next `start` or `finish`, which raises RankLost.
    """

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        followers: Sequence[FollowerProcess],
        on_loss: Callable[[RankLost], None] | None = None,
    ) -> None:
        self._on_loss = on_loss
        self._watch = RankWatch(followers)
        self._driver = ThreadedExecution(_Driver(runner, block_size, followers, self._watch))
        self._watch.start(self._lose)

    def start(self, work: SchedulerOutput) -> None:
        """Hand the step to all ranks."""
        self._driver.start(work)

    def finish(self) -> ModelRunnerOutput:
        """Wait for the step; raises RankLost when there will be no end of it."""
        return self._driver.finish()

    def close(self) -> None:
        """End the thread and the followers, after the step in flight."""
        self._driver.close()
        self._watch.close()

    def _lose(self, loss: RankLost) -> None:
        self._driver.fail(loss)
        if self._on_loss is not None:
            self._on_loss(loss)


class _Driver:
    """The Runner of the first rank, which tells the others."""

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        followers: Sequence[FollowerProcess],
        watch: RankWatch,
    ) -> None:
        self.limits = runner.limits
        self._runner = runner
        self._block_size = block_size
        self._followers = followers
        self._watch = watch
        self._error: Exception | None = None

    def execute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        # Ranks that were parted within a step would add up parts of different steps.
        if self._error is not None:
            raise RankLost("The ranks were parted by an error before.") from self._error
        try:
            with self._watch.step():
                frame = encode(work, self._block_size)
                for follower in self._followers:
                    follower.channel.send(frame)
                return self._runner.execute(work)
        except Exception as error:
            self._error = error
            loss = self._watch.loss(_REASON_LIMIT_S)
            if loss is not None:
                raise loss from error
            self._watch.close()
            raise
