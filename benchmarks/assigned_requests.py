"""Requests in Valkey as if a gateway had admitted them and a dispatcher had assigned them."""

import time
from collections.abc import Iterable

import redis

from control.streams.functions import MAX_INBOX, assign, enqueue, invoke, lead
from control.streams.keys import ModelKeys
from control.streams.messages import Assignment, Charge, QueueEntry
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams

WEIGHTS = "bench"
_TOKEN = "bench"  # noqa: S105 - a fencing token
_UNCHARGED = Charge("bench", 1.0, 0.0, 0.0, 0.0)
_LEASE_MS = 3_600_000
_LIFE_S = 3_600.0


def stream_request(request_id: str, prompt: Iterable[int], output: int) -> GenerationRequest:
    """A reader's request for just so many greedy tokens, which has an hour."""
    arrival = time.time()
    return GenerationRequest(
        request_id=request_id,
        prompts=(tuple(prompt),),
        sampling=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=arrival,
        deadline_at=arrival + _LIFE_S,
    )


def assign_requests(
    client: redis.Redis,
    keys: ModelKeys,
    replica_id: str,
    requests: Iterable[tuple[GenerationRequest, str]],
) -> list[Assignment]:
    """Queue each request for its follower and give it to the replica, MAX_INBOX at most."""
    client.set(keys.serving(WEIGHTS), b"1")
    led = invoke(client, lead(keys, _TOKEN, _LEASE_MS))
    assert led == b"leading", led
    assignments = []
    for request, follower_id in requests:
        entry = QueueEntry(
            request_id=request.request_id,
            tenant_id="bench",
            priority_class=request.priority_class,
            weights_digest=WEIGHTS,
            num_sequences=request.num_choices,
            max_kv_tokens=request.max_kv_tokens,
            arrival=request.arrival,
            deadline_at=request.deadline_at,
        )
        queued = invoke(client, enqueue(keys, entry, request, follower_id, MAX_INBOX))
        assert queued == b"queued", queued
        word, attempt, _ = invoke(client, assign(keys, _TOKEN, entry, replica_id, _UNCHARGED))
        assert word == b"assigned", word
        assignments.append(Assignment(request.request_id, int(attempt), WEIGHTS, request))
    return assignments
