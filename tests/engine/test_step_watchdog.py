"""The watchdog on a virtual clock: what is a stall, since when, and when it is over."""

import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_watchdog import (
    FIRST_STEP_LIMIT_S,
    NUM_FIRST_STEPS,
    NUM_RECENT_STEPS,
    RecentSteps,
    StallKind,
    StepWatchdog,
    Verdict,
)


def run_steps(watchdog: StepWatchdog, now: float, count: int, step_s: float) -> float:
    """So many steps, one after another, with work left behind them; returns when they ended."""
    for _ in range(count):
        watchdog.waiting(now, 2)
        watchdog.step_started(now)
        now += step_s
        watchdog.step_finished(now, True)
    watchdog.waiting(now, 2)
    return now


def kind_at(watchdog: StepWatchdog, now: float) -> StallKind | None:
    verdict = watchdog.verdict(now)
    return None if verdict is None else verdict.kind


def test_an_idle_engine_is_never_stalled() -> None:
    watchdog = StepWatchdog()
    assert watchdog.verdict(1e6) is None
    now = run_steps(watchdog, 0.0, 20, 0.01)
    watchdog.waiting(now, 0)
    assert watchdog.verdict(now + 1e6) is None


def test_work_that_nobody_computes_for_fifteen_seconds_is_a_stall() -> None:
    watchdog = StepWatchdog()
    watchdog.waiting(100.0, 0)
    watchdog.waiting(200.0, 3)
    for second in range(16):
        watchdog.waiting(200.0 + second, 3)
    assert watchdog.verdict(215.0) is None
    verdict = watchdog.verdict(215.5)
    assert verdict is not None
    assert (verdict.kind, verdict.since) == (StallKind.NO_PROGRESS, 200.0)
    assert "15.5 s although 3 sequences" in verdict.message


def test_time_without_work_is_no_time_without_progress() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 20, 0.01)
    watchdog.waiting(now, 0)
    watchdog.waiting(now + 3600, 1)
    assert watchdog.verdict(now + 3610) is None
    assert kind_at(watchdog, now + 3616) is StallKind.NO_PROGRESS


def test_steps_that_compute_nothing_are_no_progress() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 20, 0.01)
    for tick in range(160):
        watchdog.step_started(now + tick * 0.1)
        watchdog.step_finished(now + tick * 0.1 + 0.05, False)
    assert watchdog.verdict(now + 15) is None
    verdict = watchdog.verdict(now + 16)
    assert verdict is not None
    assert (verdict.kind, verdict.since) == (StallKind.NO_PROGRESS, now)


def test_a_quick_engines_step_is_overdue_after_one_second() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 200, 0.02)
    watchdog.step_started(now)
    assert watchdog.verdict(now + 1.0) is None
    verdict = watchdog.verdict(now + 1.25)
    assert verdict is not None
    assert (verdict.kind, verdict.since) == (StallKind.STEP_OVERDUE, now)
    assert "1.2 s ago and has not ended; its limit is 1.0 s" in verdict.message


def test_a_slow_engines_step_is_overdue_after_three_times_the_p99() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 200, 0.02)
    now = run_steps(watchdog, now, 5, 2.0)
    watchdog.step_started(now)
    assert watchdog.verdict(now + 5.9) is None
    assert kind_at(watchdog, now + 6.1) is StallKind.STEP_OVERDUE


def test_steps_of_long_ago_do_not_make_later_ones_patient() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 20, 4.0)
    now = run_steps(watchdog, now, NUM_RECENT_STEPS, 0.02)
    watchdog.step_started(now)
    assert kind_at(watchdog, now + 1.1) is StallKind.STEP_OVERDUE


def test_however_slow_the_steps_were_fifteen_seconds_of_silence_is_a_stall() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 20, 10.0)
    watchdog.step_started(now)
    assert watchdog.verdict(now + 15.0) is None
    assert kind_at(watchdog, now + 15.1) is StallKind.NO_PROGRESS


@pytest.mark.parametrize("num_before", [0, NUM_FIRST_STEPS - 1])
def test_the_first_steps_of_a_process_have_a_generous_limit(num_before: int) -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, num_before, 0.02)
    watchdog.waiting(now, 1)
    watchdog.step_started(now)
    assert watchdog.verdict(now + FIRST_STEP_LIMIT_S) is None
    verdict = watchdog.verdict(now + FIRST_STEP_LIMIT_S + 0.1)
    assert verdict is not None
    assert verdict.kind is StallKind.STEP_OVERDUE
    assert "first steps" in verdict.message


def test_a_stall_is_over_with_the_next_progress_and_counted_once() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 50, 0.02)
    watchdog.step_started(now)
    assert watchdog.verdict(now + 30) is not None
    assert watchdog.stalls_total == 0
    watchdog.step_finished(now + 30, True)
    assert watchdog.verdict(now + 30) is None
    assert watchdog.stalls_total == 1
    run_steps(watchdog, now + 30, 50, 0.02)
    assert watchdog.stalls_total == 1


def test_an_overdue_step_that_computed_nothing_stays_one_stall() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 50, 0.02)
    watchdog.step_started(now)
    watchdog.step_finished(now + 20, False)
    assert kind_at(watchdog, now + 20) is StallKind.NO_PROGRESS
    assert watchdog.stalls_total == 0
    run_steps(watchdog, now + 20, 1, 0.02)
    assert watchdog.stalls_total == 1


def test_a_stall_is_over_when_nothing_waits_any_more() -> None:
    watchdog = StepWatchdog()
    watchdog.waiting(0.0, 1)
    watchdog.waiting(20.0, 1)
    assert watchdog.stalls_total == 0
    watchdog.waiting(21.0, 0)
    assert watchdog.verdict(21.0) is None
    assert watchdog.stalls_total == 1


def test_a_stall_that_nobody_asked_about_is_counted() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 50, 0.02)
    run_steps(watchdog, now, 1, 8.0)
    assert watchdog.stalls_total == 1


def test_a_step_queued_behind_another_is_timed_from_the_others_end() -> None:
    watchdog = StepWatchdog()
    now = 0.0
    watchdog.waiting(now, 1)
    watchdog.step_started(now)
    for _ in range(50):
        watchdog.step_started(now + 0.01)
        now += 0.6
        watchdog.step_finished(now, True)
    # Two are never longer than 1.8 s: each took 0.6 s, though each was in flight for 1.2 s.
    assert watchdog.verdict(now + 1.7) is None
    verdict = watchdog.verdict(now + 1.9)
    assert verdict is not None
    assert verdict.since == now


def test_a_step_without_anything_else_waiting_is_watched_too() -> None:
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 50, 0.02)
    watchdog.waiting(now, 0)
    watchdog.step_started(now + 500)
    assert watchdog.verdict(now + 500.5) is None
    assert kind_at(watchdog, now + 502) is StallKind.STEP_OVERDUE


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.integers(1, 30))
def test_at_most_one_recent_step_in_a_hundred_took_longer_than_the_p99(
    durations: list[float], max_steps: int
) -> None:
    recent = RecentSteps(max_steps)
    for duration in durations:
        recent.add(duration)
    window = sorted(durations[-max_steps:])
    assert len(recent) == len(window)
    assert recent.p99_s == window[-1]


def test_the_p99_of_a_full_window_leaves_out_its_slowest_hundredth() -> None:
    recent = RecentSteps(NUM_RECENT_STEPS)
    for step in range(2 * NUM_RECENT_STEPS):
        recent.add(float(step % NUM_RECENT_STEPS))
    assert recent.p99_s == NUM_RECENT_STEPS - 1 - NUM_RECENT_STEPS // 100


def test_another_thread_sees_one_instant_whenever_it_asks() -> None:
    """Steps of 10 ms with idle years between: only a mixture of two instants looks like a stall."""
    watchdog = StepWatchdog()
    now = run_steps(watchdog, 0.0, 50, 0.01)
    watchdog.waiting(now, 0)
    clock, seen, is_over = [now], list[Verdict | None](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            verdict = watchdog.verdict(clock[0])
            if verdict is not None:
                seen.append(verdict)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=ask)
    reader.start()
    try:
        for _ in range(3000):
            # The reader may hold an older clock value than the watchdog, never a newer one.
            now += 1e6
            watchdog.waiting(now, 1)
            watchdog.step_started(now)
            clock[0] = now
            watchdog.step_finished(now + 0.01, True)
            watchdog.waiting(now + 0.01, 0)
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert seen == []


def test_watching_a_step_costs_microseconds() -> None:
    watchdog = StepWatchdog()
    durations = [0.01 + 0.001 * (step * 7919 % 101) for step in range(4000)]
    now, best_s = 0.0, float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for duration in durations:
            watchdog.step_started(now)
            now += duration
            watchdog.step_finished(now, True)
        best_s = min(best_s, time.perf_counter() - begun)
    # The budget is 5 us on a machine of its own; a shared one may be several times slower.
    assert best_s / len(durations) < 50e-6
