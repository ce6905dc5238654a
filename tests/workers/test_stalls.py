"""A replica whose engine hangs takes nothing new, and goes on by itself when it moves again."""

import asyncio
import threading

from tests.workers.service import Service, until


async def test_a_stalled_replica_accepts_nothing_until_it_moves_again(
    service: Service, step_gate: threading.Event
) -> None:
    snapshot = service.start_replica().replica.snapshot
    async with service.caller() as caller:
        # Enough steps for the engine to know how long they take.
        await caller.ask(service.request(b"x" * 40))
        step_gate.clear()
        asking = asyncio.create_task(caller.ask(service.request(b"again")))
        await asyncio.to_thread(until, lambda: snapshot().is_stalled)
        assert not snapshot().is_accepting
        assert snapshot().stalls_total == 1
        step_gate.set()
        assert (await asking).text == "again"
    until(lambda: snapshot().is_accepting)
    assert not snapshot().is_stalled
    assert snapshot().stalls_total == 1
