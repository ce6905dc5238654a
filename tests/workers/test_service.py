"""Requests through the real dispatcher, replica, Redis and PostgreSQL."""

import asyncio

from engine.interface.generation_delta import FinishReason
from engine.interface.generation_request import PriorityClass
from tests.workers.service import Service, until


async def test_a_request_is_answered_settled_and_ended_once(service: Service) -> None:
    replica = service.start_replica()
    async with service.caller() as caller:
        request = service.request("Grüße, 世界!".encode())
        answer = await caller.ask(request)
    assert answer.text == "Grüße, 世界!"
    assert [d.serial for d in answer.deltas] == list(range(len(answer.deltas)))
    reasons = [d.finish_reason for d in answer.deltas if d.finish_reason]
    assert reasons == [FinishReason.STOP]
    num_prompt, num_said = len("Grüße, 世界!".encode()), len(answer.token_ids)
    assert num_said == num_prompt + 1  # and the end-of-sequence token
    assert service.usage(request.request_id) == [(num_prompt, num_said, 0, "finished", None)]
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == num_said
    replica.drain()


async def test_many_requests_get_their_own_words(service: Service) -> None:
    replicas = [service.start_replica(), service.start_replica()]
    async with service.caller() as caller:
        requests = [service.request(f"request {i:03}".encode() * 3) for i in range(40)]
        answers = await asyncio.gather(*(caller.ask(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids[:-1] == request.prompts[0]
        assert len(service.usage(request.request_id)) == 1
    for replica in replicas:
        replica.drain()
        assert replica.replica.snapshot().kv_blocks_free == 2048 // 16


async def test_a_cancelled_request_stops_frees_and_bills_what_was_said(service: Service) -> None:
    replica = service.start_replica(delay_ms=20)
    async with service.caller() as caller:
        request = service.request(b"x" * 200, max_tokens=200)
        answer = await caller.ask(request, most=5)
        assert not answer.last.is_last
        await caller.follower.cancel(service.model, request.request_id)
        until(lambda: service.state(request.request_id) == "cancelled")
    ((_, completion, wasted, outcome, error),) = service.usage(request.request_id)
    assert (wasted, outcome, error) == (0, "cancelled", "cancelled")
    assert 5 <= completion < 100
    until(lambda: replica.replica.snapshot().kv_blocks_free == 2048 // 16)
    replica.drain()


async def test_a_request_stopped_by_a_leaving_gateway_is_told_from_a_hang_up(
    service: Service,
) -> None:
    service.start_replica(delay_ms=20)
    async with service.caller() as caller:
        request = service.request(b"x" * 200, max_tokens=200)
        await caller.ask(request, most=3)
        await caller.follower.cancel(service.model, request.request_id, "server_restarting")
        await asyncio.to_thread(until, lambda: service.state(request.request_id) == "failed")
    ((_, _, _, outcome, error),) = service.usage(request.request_id)
    assert (outcome, error) == ("failed", "server_restarting")


async def test_a_request_cancelled_in_the_queue_is_never_computed(service: Service) -> None:
    async with service.caller() as caller:
        request = service.request(b"nobody will say this")
        async with caller.follower.subscribe(service.model, request.request_id) as subscription:
            await caller.admission.accept(service.reservation(request), request)
            await caller.follower.cancel(service.model, request.request_id)
            delta = await subscription.next(20)
    assert delta is not None
    assert delta.error == "cancelled"
    assert service.usage(request.request_id) == [(0, 0, 0, "cancelled", "cancelled")]
    assert service.client.xlen(service.keys.queue(PriorityClass.INTERACTIVE)) == 0


async def test_a_request_whose_deadline_passes_in_the_queue_ends(service: Service) -> None:
    async with service.caller() as caller:
        request = service.request(b"too late", life_s=0.2)
        answer = await caller.ask(request)
    assert answer.last.error == "deadline_exceeded"
    assert service.state(request.request_id) == "failed"


async def test_a_draining_replica_hands_its_requests_back_with_their_tokens(
    service: Service,
) -> None:
    first = service.start_replica(delay_ms=30)
    prompt = bytes(range(65, 91)) * 4
    async with service.caller() as caller:
        request = service.request(prompt, max_tokens=200)
        asking = asyncio.create_task(caller.ask(request))
        until_said = asyncio.to_thread(until, lambda: service.num_deltas(request.request_id) > 5)
        await until_said
        second = service.start_replica()
        await asyncio.to_thread(first.drain)
        answer = await asking
    assert answer.token_ids[:-1] == tuple(prompt)
    assert answer.text == prompt.decode()
    assert [d.serial for d in answer.deltas] == list(range(len(answer.deltas)))
    ((_, completion, _, outcome, _),) = service.usage(request.request_id)
    assert (completion, outcome) == (len(prompt) + 1, "finished")
    second.drain()


async def test_a_stop_string_ends_a_choice_and_what_the_engine_said_beyond_is_waste(
    service: Service,
) -> None:
    replica = service.start_replica(delay_ms=5)
    async with service.caller() as caller:
        request = service.request(b"one two STOP three four five six", stop=("STOP",))
        answer = await caller.ask(request)
    assert answer.text == "one two "
    assert answer.last.error is None
    ((_, completion, wasted, outcome, _),) = service.usage(request.request_id)
    assert completion == len("one two STOP")
    assert wasted <= 3
    assert outcome == "finished"
    replica.drain()


async def test_choices_of_one_request_each_say_everything(service: Service) -> None:
    replica = service.start_replica()
    async with service.caller() as caller:
        request = service.request(b"again", n=3)
        answer = await caller.ask(request)
    assert [answer.of(choice)[:-1] for choice in range(3)] == [tuple(b"again")] * 3
    assert service.usage(request.request_id) == [(5, 18, 0, "finished", None)]
    replica.drain()


async def test_requests_of_a_follower_that_died_are_cancelled(service: Service) -> None:
    replica = service.start_replica(delay_ms=50)
    async with service.caller() as caller:
        request = service.request(b"x" * 200, max_tokens=200)
        await caller.ask(request, most=2)
        follower_id = caller.follower.follower_id
        caller.task.cancel()
        await asyncio.wait([caller.task])
        service.client.delete(f"follower:{follower_id}")
        await asyncio.to_thread(until, lambda: service.state(request.request_id) == "cancelled")
    replica.drain()
