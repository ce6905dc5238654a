"""The instants of one attempt, on two clocks, and what they come to."""

from dataclasses import replace

import pytest

from control.metering.timings import quantile
from control.streams.messages import Assignment
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from workers.request_times import Received, RequestTimes

REQUEST = GenerationRequest(
    "r" * 26,
    ((1, 2),),
    SamplingParams(max_tokens=9),
    PriorityClass.INTERACTIVE,
    "s",
    1000.0,
    1060.0,
)
ORDER = Assignment("r" * 26, 1, "d", REQUEST, queued_at=1000.004, assigned_at=1000.010)
# On the shared clock a request was here at 1000.012, which this process calls 50.
RECEIVED = Received(1000.012, 50.0)


def token(scheduled_at: float = 50.001) -> SequenceUpdate:
    return SequenceUpdate("r" * 26, 0, (7,), scheduled_at=scheduled_at)


def test_stages_follow_one_another_from_the_arrival_to_the_first_token() -> None:
    times = RequestTimes(ORDER, RECEIVED)
    times.note_update(token(), 50.021)
    times.note_published(50.022)
    found = times.timings()
    stages = [found.accept_s, found.queue_s, found.place_s, found.wait_s, found.prefill_s]
    assert stages == pytest.approx([0.004, 0.006, 0.002, 0.001, 0.020])
    assert found.publish_s == pytest.approx(0.001)
    # It was published 10 ms after it was here, which was 12 ms after it had arrived.
    total = sum(stage or 0.0 for stage in (*stages, found.publish_s))
    assert total == pytest.approx(0.012 + 0.022)


def test_a_clock_that_tells_whole_milliseconds_makes_no_stage_negative() -> None:
    order = replace(ORDER, queued_at=999.999, assigned_at=999.999)
    found = RequestTimes(order, RECEIVED).timings()
    assert (found.accept_s, found.queue_s) == (0.0, 0.0)
    assert found.place_s == pytest.approx(0.012)


def test_of_a_later_attempt_only_the_sum_of_what_came_before_it_is_known() -> None:
    found = RequestTimes(replace(ORDER, attempt=2), RECEIVED).timings()
    assert (found.accept_s, found.place_s) == (None, None)
    assert found.queue_s == pytest.approx(0.012)


def test_the_pace_is_told_by_its_middle_its_tail_and_its_worst() -> None:
    times = RequestTimes(ORDER, RECEIVED)
    now = 51.0
    for gap in [0.0] + [0.01] * 90 + [0.1] * 9 + [1.0]:
        now += gap
        times.note_update(token(), now)
    found = times.timings()
    assert found.inter_token_p50_s == pytest.approx(0.01)
    assert found.inter_token_p95_s == pytest.approx(0.1)
    assert found.inter_token_max_s == pytest.approx(1.0)
    assert quantile([], 0.5) is None


def test_a_cancellation_is_followed_from_who_asked_to_the_engines_stop() -> None:
    times = RequestTimes(ORDER, RECEIVED)
    times.note_update(token(), 50.021)
    # Asked 3 ms before the replica knew of it, at its 40th step.
    times.note_cancel(1000.012 + 0.030 - 0.003, 50.030, 40)
    times.note_update(token(), 50.031)
    end = SequenceUpdate("r" * 26, 0, (), SequenceEnd.CANCELLED, step=41, blocks_freed=5)
    times.note_update(end, 50.032)
    proof = times.timings().cancel
    assert proof is not None
    assert proof.asked_at == pytest.approx(1000.039)
    assert proof.seen_s == pytest.approx(0.005)
    assert (proof.step, proof.num_steps) == (41, 1)
    assert (proof.tokens_after, proof.blocks_freed) == (1, 5)


def test_a_request_that_nobody_cancelled_has_no_proof() -> None:
    times = RequestTimes(ORDER, RECEIVED)
    times.note_update(SequenceUpdate("r" * 26, 0, (7,), SequenceEnd.LENGTH), 50.1)
    assert times.timings().cancel is None
