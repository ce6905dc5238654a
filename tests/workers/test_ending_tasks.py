"""Tasks that swallow a cancellation are ended all the same, or left behind."""

import asyncio
import logging

import pytest

from workers import ending_tasks
from workers.ending_tasks import MAX_CANCELS, end_tasks


class Swallower:
    """Waits for ever, and for so many times takes no notice of being cancelled."""

    def __init__(self, num_swallowed: int) -> None:
        self.num_left = num_swallowed
        self.has_begun = asyncio.Event()
        self.has_swallowed = asyncio.Event()

    async def wait(self) -> None:
        """As when a library raises something else in place of the cancellation."""
        while True:
            self.has_begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.num_left:
                    raise
                self.num_left -= 1
                self.has_swallowed.set()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a cancellation soon."""
    monkeypatch.setattr(ending_tasks, "CANCEL_AGAIN_S", 0.01)


async def begun(swallower: Swallower) -> "asyncio.Task[None]":
    task = asyncio.create_task(swallower.wait())
    await swallower.has_begun.wait()
    return task


async def test_a_cancellation_that_was_swallowed_is_repeated() -> None:
    tasks = [await begun(Swallower(num)) for num in (0, 1, MAX_CANCELS - 1)]
    await end_tasks(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_who_swallows_every_cancellation_is_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stubborn = Swallower(1000)
    tasks = [await begun(stubborn), await begun(Swallower(0))]
    with caplog.at_level(logging.ERROR):
        await end_tasks(tasks)
    assert [task.done() for task in tasks] == [False, True]
    assert "left behind" in caplog.text
    stubborn.num_left = 0
    await end_tasks(tasks)
    assert tasks[0].cancelled()


async def test_a_task_that_failed_before_is_told_of_and_raises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise OSError("away")

    task = asyncio.create_task(fail(), name="failing")
    await asyncio.wait([task])
    await end_tasks([task])
    assert "failing ended with OSError" in caplog.text


async def test_whoever_ends_tasks_can_be_cancelled_meanwhile() -> None:
    stubborn = Swallower(1000)
    task = await begun(stubborn)
    ending = asyncio.create_task(end_tasks([task]))
    await stubborn.has_swallowed.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    stubborn.num_left = 0
    await end_tasks([task])
