"""A stall is logged when it begins and when it is over, and never in between."""

import logging

import pytest

from engine.step_watchdog import StallKind, Verdict
from workers.stall_watch import StallWatch

OVERDUE = Verdict(StallKind.STEP_OVERDUE, 1.0, "A step has been computing for 2.0 s.")
STILL_OVERDUE = Verdict(StallKind.STEP_OVERDUE, 1.0, "A step has been computing for 2.2 s.")
SILENT = Verdict(StallKind.NO_PROGRESS, 1.0, "Nothing has been computed for 15.5 s.")


def test_a_stall_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    said = [None, OVERDUE, STILL_OVERDUE, SILENT, None, None]
    verdicts = iter(said)
    watch = StallWatch(lambda: next(verdicts))
    are_stalled = []
    for _ in said:
        watch.look()
        are_stalled.append(watch.is_stalled)
    assert are_stalled == [False, True, True, True, False, False]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "computing for 2.0 s" in caplog.messages[0]
    assert "moves again" in caplog.messages[1]


def test_a_second_stall_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    verdicts = iter([OVERDUE, None, OVERDUE])
    watch = StallWatch(lambda: next(verdicts))
    for _ in range(3):
        watch.look()
    assert watch.is_stalled
    assert len(caplog.messages) == 3
