"""One accepted request, from its acceptance to the last byte of its answer.

Whatever goes wrong in between, exactly one of three things happens: the answer is complete; the
caller is told an error; or the caller is gone. In the last two the request is cancelled, so that
nobody computes what nobody hears. No database connection is held while an answer is sent.
"""

import asyncio
import logging
from collections.abc import Coroutine

from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.gateway import Gateway
from api.streaming import StreamAnswer
from api.whole_answer import WholeAnswer
from control.admission.reservation import Reservation
from control.errors import Cancelled, Restarting, ServiceError, StoreUnavailable
from engine.interface.generation_request import GenerationRequest

ACCEPT_LIMIT_S = 10.0
NUM_CANCEL_TRIES = 5
CANCEL_RETRY_S = 0.5

_log = logging.getLogger("headrace.gateway")


class GenerationResponse(Response):
    """Accepts the request and sends its answer."""

    def __init__(
        self,
        gateway: Gateway,
        request: GenerationRequest,
        reservation: Reservation,
        answer: StreamAnswer | WholeAnswer,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._request = request
        self._reservation = reservation
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the end, or until the caller hangs up."""
        del scope
        await _unless_disconnected(receive, self._serve(send))

    async def _serve(self, send: Send) -> None:
        model, request_id = self._reservation.model, self._request.request_id
        with self._gateway.drain.watching():
            async with self._gateway.follower.subscribe(model, request_id) as subscription:
                accepting = asyncio.create_task(
                    self._gateway.admission.accept(self._reservation, self._request)
                )
                try:
                    await _accepted(accepting)
                    await self._answer.run(subscription, send)
                except asyncio.CancelledError:
                    if not self._gateway.drain.is_over:
                        self._withdraw(accepting)
                        raise
                    self._withdraw(accepting, Restarting.code)
                    _uncancel()
                    message = "This gateway is restarting. Repeat the request."
                    await self._answer.fail(Restarting(message, retry_after_ms=1000), send)
                except ServiceError as error:
                    self._withdraw(accepting)
                    await self._answer.fail(error, send)
                except BaseException:
                    self._withdraw(accepting)
                    raise

    def _withdraw(self, accepting: "asyncio.Task[None]", error: str = Cancelled.code) -> None:
        """Cancel the request, in the background: the caller need not wait, or is gone."""
        self._gateway.start(self._cancel(accepting, error))

    async def _cancel(self, accepting: "asyncio.Task[None]", error: str) -> None:
        # A cancel that overtook the acceptance would find nothing to cancel.
        await asyncio.gather(accepting, return_exceptions=True)
        for _ in range(NUM_CANCEL_TRIES):
            try:
                await self._gateway.follower.cancel(
                    self._reservation.model, self._request.request_id, error
                )
            except (RedisError, OSError):
                await asyncio.sleep(CANCEL_RETRY_S)
            else:
                return
        _log.warning("request %s could not be cancelled: Redis is away", self._request.request_id)


async def _accepted(accepting: "asyncio.Task[None]") -> None:
    """Wait for the acceptance; what is under way is not torn apart by a hang-up."""
    try:
        async with asyncio.timeout(ACCEPT_LIMIT_S):
            await asyncio.shield(accepting)
    except TimeoutError as error:
        raise StoreUnavailable("The ledger does not answer. Try again shortly.") from error


async def _unless_disconnected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Do the work, but cancel it when the caller hangs up. Raises what the work raises."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            await worker
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
