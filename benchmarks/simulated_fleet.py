"""A fleet without models: processes that publish steps on schedule, and processes that read them.

Each speaks with its parent through a pipe: it says that it is ready, is told the monotonic
second at which to begin, and at the end says what it did (`Share`).
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

from redis import Redis

from benchmarks.assigned_requests import assign_requests, stream_request
from control.streams.connection import connect
from control.streams.follower import FeedReply
from control.streams.frames import unpack_frames
from control.streams.functions import Publication, invoke, step
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta

KEYS = ModelKeys("bench")
FIRST_ATTEMPT = 1
OUTPUT_TOKENS = 4_096
READ_COUNT = 64
READ_BLOCK_MS = 200
# A reader that hears nothing for so long gives up; what is missing then counts as lost.
SILENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas, their running sequences and steps, gateways, and for how long."""

    num_replicas: int = 70
    num_sequences: int = 60
    steps_per_s: float = 20.0
    num_gateways: int = 4
    num_publishers: int = 4
    num_steps: int = 200

    @property
    def tokens_per_s(self) -> float:
        """What is asked for."""
        return self.num_replicas * self.num_sequences * self.steps_per_s

    @property
    def num_tokens(self) -> int:
        """All tokens of the measurement."""
        return self.num_replicas * self.num_sequences * self.num_steps


@dataclass(frozen=True, slots=True)
class Share:
    """What one process did: tokens, processor seconds, and how late its steps were."""

    num_tokens: int
    cpu_s: float
    late_ms: list[float]


def assign_all(client: Redis, fleet: Fleet) -> None:
    """Accept and assign a request for every sequence; the gateways share them evenly."""
    for replica in range(fleet.num_replicas):
        requests = [
            (stream_request(request_id, (1, 2, 3), OUTPUT_TOKENS), _gateway(n % fleet.num_gateways))
            for n, request_id in enumerate(_request_ids(replica, fleet))
        ]
        assign_requests(client, KEYS, f"replica-{replica}", requests)


def publish(pipe: Connection, url: str, fleet: Fleet, number: int) -> None:
    """Publish the steps of every so-manieth replica, each when it is due or as soon as can be."""
    client = connect(url)
    client.ping()
    mine = [
        list(_request_ids(r, fleet))
        for r in range(number, fleet.num_replicas, fleet.num_publishers)
    ]
    pipe.send(None)
    start_at = pipe.recv()
    began_s = time.process_time()
    late_ms = []
    log_bytes: Counter[str] = Counter()
    for serial in range(fleet.num_steps):
        for place, request_ids in enumerate(mine):
            due = start_at + (serial + place / len(mine)) / fleet.steps_per_s
            time.sleep(max(0.0, due - time.monotonic()))
            late_ms.append(1000 * (time.monotonic() - due))
            replies = invoke(client, step(KEYS, _said(request_ids, serial, log_bytes)))
            assert replies == [b"ok"] * len(request_ids), "a step was refused"
    num_tokens = fleet.num_steps * fleet.num_sequences * len(mine)
    pipe.send(Share(num_tokens, time.process_time() - began_s, late_ms))
    client.close()


def read(pipe: Connection, url: str, fleet: Fleet, number: int) -> None:
    """Read one gateway's feed to its end, and unpack all that is in it."""
    client = connect(url)
    feed, last = KEYS.feed(_gateway(number)), b"0"
    wanted = len(range(number, fleet.num_sequences, fleet.num_gateways))
    wanted *= fleet.num_replicas * fleet.num_steps
    pipe.send(None)
    pipe.recv()
    began_s, num_tokens, heard_at = time.process_time(), 0, time.monotonic()
    while num_tokens < wanted and time.monotonic() - heard_at < SILENCE_S:
        reply = client.xread({feed: last}, count=READ_COUNT, block=READ_BLOCK_MS)
        for _, entries in cast("FeedReply", reply or []):
            heard_at = time.monotonic()
            for entry_id, fields in entries:
                last = entry_id
                num_tokens += sum(len(delta.token_ids) for delta in unpack_frames(fields[b"d"]))
    pipe.send(Share(num_tokens, time.process_time() - began_s, []))
    client.close()


def _said(request_ids: list[str], serial: int, log_bytes: Counter[str]) -> list[Publication]:
    """One token of each request, whose log has so many bytes before it."""
    publications = [
        Publication.of(FIRST_ATTEMPT, log_bytes[request_id], [_word(request_id, serial)])
        for request_id in request_ids
    ]
    for publication in publications:
        log_bytes[publication.request_id] += len(publication.frames)
    return publications


def _word(request_id: str, serial: int) -> GenerationDelta:
    return GenerationDelta(request_id, 0, serial, serial, (1_000 + serial,), " word")


def _request_ids(replica: int, fleet: Fleet) -> Iterator[str]:
    """As long as real ones."""
    for sequence in range(fleet.num_sequences):
        yield f"{replica:013d}{sequence:013d}"


def _gateway(number: int) -> str:
    return f"gateway-{number:016x}"
