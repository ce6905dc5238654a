"""The server-side moves, on a real server: each is all or nothing, and fenced."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from control.streams.connection import connect
from control.streams.frames import pack_frames, unpack_frames
from control.streams.functions import (
    FunctionCall,
    Publication,
    assign,
    cancel,
    enqueue,
    follow,
    invoke,
    lead,
    requeue,
    seize,
    set_clock,
    step,
)
from control.streams.keys import ModelKeys
from control.streams.messages import (
    Assignment,
    Cancel,
    Charge,
    Ending,
    QueueEntry,
    read_ending,
    read_inbox_message,
)
from engine.interface.generation_delta import FinishReason, GenerationDelta, Usage
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams

TOKEN = "leader"
DIGEST = "d" * 64
CHARGE = Charge("t", 1.0, 30.0, 100.0, 130.0)


def delta(request_id: str, serial: int, *, is_last: bool = False) -> GenerationDelta:
    return GenerationDelta(
        request_id,
        0,
        serial,
        serial,
        token_ids=() if is_last else (serial,),
        usage=Usage(2, serial) if is_last else None,
    )


class Transport:
    """One model's keys on the real server."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = ModelKeys(f"m-{secrets.token_hex(4)}")
        assert self(lead(self.keys, TOKEN, 60_000)) == b"leading"
        client.set(self.keys.serving(DIGEST), b"1")

    def __call__(self, call: FunctionCall) -> Any:
        return invoke(self.client, call)

    def entry(self, request_id: str) -> QueueEntry:
        return QueueEntry(request_id, "t", PriorityClass.INTERACTIVE, DIGEST, 1, 3, 0.0, 60.0)

    def queue(self, request_id: str, max_queued: int = 10) -> Any:
        request = GenerationRequest(
            request_id,
            ((1, 2),),
            SamplingParams(max_tokens=1),
            PriorityClass.INTERACTIVE,
            "scope",
            0.0,
            60.0,
        )
        return self(enqueue(self.keys, self.entry(request_id), request, "f1", max_queued))

    def assign(self, request_id: str, replica_id: str = "r1") -> Any:
        return self(assign(self.keys, TOKEN, self.entry(request_id), replica_id, CHARGE))

    def say(self, request_id: str, attempt: int, serial: int, *, is_last: bool = False) -> bytes:
        """Say one delta, after all those of lesser serials."""
        log_bytes = len(pack_frames(delta(request_id, earlier) for earlier in range(serial)))
        said = delta(request_id, serial, is_last=is_last)
        (reply,) = self(step(self.keys, [Publication.of(attempt, log_bytes, [said])]))
        assert isinstance(reply, bytes)
        return reply

    def log(self, request_id: str) -> list[int]:
        data = self.client.get(self.keys.log(request_id)) or b""
        assert isinstance(data, bytes)
        return [delta.serial for delta in unpack_frames(data)]

    def inbox(self, replica_id: str = "r1") -> list[Assignment | Cancel]:
        entries: Any = self.client.xrange(self.keys.inbox(replica_id))
        return [read_inbox_message(fields) for _, fields in entries]

    def queued(self) -> int:
        return int(self.client.xlen(self.keys.queue(PriorityClass.INTERACTIVE)))


@pytest.fixture
def transport(redis_url: str) -> Iterator[Transport]:
    client = connect(redis_url)
    yield Transport(client)
    client.close()


def test_a_full_queue_refuses_and_keeps_nothing(transport: Transport) -> None:
    assert transport.queue("a", max_queued=1) == b"queued"
    assert transport.queue("b", max_queued=1) == b"full"
    assert not transport.client.exists(transport.keys.live("b"))
    assert transport.client.smembers(transport.keys.open) == {b"a"}


def test_a_request_that_nobody_serves_is_refused(transport: Transport) -> None:
    transport.client.delete(transport.keys.serving(DIGEST))
    assert transport.queue("a") == b"unserved"
    assert not transport.client.exists(transport.keys.live("a"))


def test_a_request_is_queued_once(transport: Transport) -> None:
    assert [transport.queue("a"), transport.queue("a")] == [b"queued", b"exists"]
    assert transport.queued() == 1


def test_an_assignment_empties_the_queue_and_fills_the_inbox(transport: Transport) -> None:
    transport.queue("a")
    word, attempt, _ = transport.assign("a")
    assert (word, attempt) == (b"assigned", 1)
    assert transport.queued() == 0
    (order,) = transport.inbox()
    assert isinstance(order, Assignment)
    assert (order.request_id, order.attempt, order.weights_digest) == ("a", 1, DIGEST)
    assert order.request.prompts == ((1, 2),)
    assert transport.assign("a") == [b"taken"]


def test_only_the_holder_of_the_token_assigns(transport: Transport) -> None:
    transport.queue("a")
    entry = transport.entry("a")
    assert transport(assign(transport.keys, "somebody else", entry, "r1", CHARGE)) == [
        b"not_leader"
    ]
    assert transport.queued() == 1
    assert transport(lead(transport.keys, "somebody else", 1000)) == b"standby"


def test_only_the_leader_or_who_has_it_puts_a_request_back(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a", "r1")
    assert transport(requeue(transport.keys, "somebody else", "a", "r1", 1)) == b"not_leader"
    assert transport(requeue(transport.keys, TOKEN, "a", "r2", 1)) == b"moved"
    assert transport(requeue(transport.keys, "", "a", "r2", 0)) == b"moved"
    assert transport.queued() == 0
    assert transport(requeue(transport.keys, "", "a", "r1", 0)) == b"queued"
    assert transport.queued() == 1


def test_deltas_of_an_old_attempt_are_refused(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a", "r1")
    assert transport.say("a", 1, 0) == b"ok"
    assert transport(requeue(transport.keys, TOKEN, "a", "r1", 1)) == b"queued"
    assert transport.say("a", 1, 1) == b"moved"
    word, attempt, _ = transport.assign("a", "r2")
    assert word == b"assigned"
    assert transport.say("a", 1, 1) == b"moved"
    assert transport.say("a", attempt, 1) == b"ok"
    assert transport.log("a") == [0, 1]
    assert transport.client.hget(transport.keys.live("a"), "failures") == b"1"


def test_deltas_said_twice_are_published_once(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    assert [transport.say("a", 1, 0), transport.say("a", 1, 0)] == [b"ok", b"ok"]
    assert transport.log("a") == [0]
    assert transport.client.xlen(transport.keys.feed("f1")) == 1


def test_after_a_gap_only_the_ending_is_published(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    transport.say("a", 1, 0)
    # Serials 1 and 2 were acknowledged and then lost with a server that failed over.
    assert transport.say("a", 1, 3) == b"gone"
    assert transport.log("a") == [0]
    assert transport.say("a", 1, 3, is_last=True) == b"ok"
    assert transport.log("a") == [0, 3]


def test_one_step_is_one_feed_entry_for_each_follower(transport: Transport) -> None:
    for name in ("a", "b"):
        transport.queue(name)
        transport.assign(name)
    assert transport(follow(transport.keys, "b", "f2"))[0] == b"following"
    publications = [Publication.of(1, 0, [delta(n, 0)]) for n in ("a", "b")]
    transport(step(transport.keys, publications))
    assert transport.client.xlen(transport.keys.feed("f1")) == 1
    assert transport.client.xlen(transport.keys.feed("f2")) == 1


def test_nothing_follows_the_last_delta(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    assert transport.say("a", 1, 0, is_last=True) == b"ok"
    assert transport.say("a", 1, 1) == b"ended"
    assert transport(cancel(transport.keys, "a")) == b"ended"
    assert transport(seize(transport.keys, "a", "cancelled")) == [b"ended"]
    assert not transport.client.sismember(transport.keys.open, "a")
    assert transport.client.pttl(transport.keys.log("a")) > 0


def test_a_cancel_tells_the_replica_once(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    assert transport(cancel(transport.keys, "a")) == b"assigned"
    assert transport(cancel(transport.keys, "a")) == b"cancelled"
    assert transport.inbox()[1:] == [Cancel("a", "cancelled")]
    assert transport.say("a", 1, 0) == b"cancelled"
    assert transport.log("a") == [0]


def test_a_cancel_in_the_queue_takes_the_request_out_of_it(transport: Transport) -> None:
    transport.queue("a")
    assert transport(cancel(transport.keys, "a")) == b"queued"
    assert transport.assign("a") == [b"ended"]
    assert transport.queued() == 1  # the note to the dispatcher


def test_who_seizes_a_request_alone_may_end_it(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    word, attempt, _ = transport(seize(transport.keys, "a", "replica_lost"))
    assert (word, attempt) == (b"seized", 2)
    assert transport.say("a", 1, 0) == b"moved"
    assert transport.say("a", 2, 0, is_last=True) == b"cancelled"
    assert transport.client.hget(transport.keys.live("a"), "cancelled") == b"replica_lost"


def test_a_cancelled_request_is_not_queued_again(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    transport(cancel(transport.keys, "a"))
    assert transport(requeue(transport.keys, TOKEN, "a", "r1", 1)) == b"cancelled"


def test_unknown_requests_are_gone(transport: Transport) -> None:
    assert transport.assign("x") == [b"gone"]
    assert transport.say("x", 1, 0) == b"gone"
    assert transport(cancel(transport.keys, "x")) == b"gone"
    assert transport(follow(transport.keys, "x", "f")) == [b"gone"]
    assert transport(requeue(transport.keys, TOKEN, "x", "r1", 1)) == b"gone"


def test_the_library_is_loaded_again_after_a_flush(transport: Transport) -> None:
    transport.client.function_flush()
    assert transport.queue("a") == b"queued"


def test_frames_survive_concatenation() -> None:
    deltas = [
        GenerationDelta("a", 1, 0, 0, (1, 2), "é\u2028\x00", FinishReason.STOP),
        GenerationDelta("a", 0, 1, 2, usage=Usage(1, 2, 0), error="cancelled"),
    ]
    assert list(unpack_frames(pack_frames(deltas[:1]) + pack_frames(deltas[1:]))) == deltas
    with pytest.raises(ValueError, match="torn"):
        list(unpack_frames(pack_frames(deltas)[:-1]))


def test_a_tenant_is_charged_once_however_often_its_request_is_assigned(
    transport: Transport,
) -> None:
    transport.queue("a")
    transport.assign("a", "r1")
    assert transport.client.hgetall(transport.keys.clock) == {b"t": b"130.0"}
    transport.client.hset(transport.keys.clock, "t", "150.0")
    assert transport(requeue(transport.keys, TOKEN, "a", "r1", 1)) == b"queued"
    queue: Any = transport.client.xrange(transport.keys.queue(PriorityClass.INTERACTIVE))
    ((_, fields),) = queue
    assert fields[b"tag"] == b"100.0"
    assert transport.assign("a", "r2")[0] == b"assigned"
    assert transport.client.hgetall(transport.keys.clock) == {b"t": b"150.0"}


def test_what_was_charged_and_used_is_told_at_the_end_once(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    transport.say("a", 1, 0)
    assert not transport.client.exists(transport.keys.endings)
    assert [transport.say("a", 1, 1, is_last=True) for _ in range(2)] == [b"ok", b"ended"]
    found: Any = transport.client.xrange(transport.keys.endings)
    ((entry_id, fields),) = found
    assert read_ending(fields) == Ending("a", CHARGE, Usage(2, 1))
    times, endings = {"t": 111.5}, [entry_id.decode()]
    assert transport(set_clock(transport.keys, "another", times, endings)) == b"not_leader"
    assert transport(set_clock(transport.keys, TOKEN, times, endings)) == b"set"
    assert transport.client.hgetall(transport.keys.clock) == {b"t": b"111.5"}
    assert transport.client.xlen(transport.keys.endings) == 0


def test_a_request_that_was_never_assigned_was_never_charged(transport: Transport) -> None:
    transport.queue("a")
    transport(seize(transport.keys, "a", "deadline_exceeded"))
    assert transport.say("a", 1, 0, is_last=True) == b"cancelled"
    assert not transport.client.exists(transport.keys.endings, transport.keys.clock)


def test_a_step_that_is_said_again_leaves_the_log_as_it_was(transport: Transport) -> None:
    transport.queue("a")
    transport.assign("a")
    for serial in (0, 1, 1, 2, 1):
        assert transport.say("a", 1, serial) == b"ok"
    assert transport.log("a") == [0, 1, 2]
    assert transport.client.pttl(transport.keys.log("a")) > 0
