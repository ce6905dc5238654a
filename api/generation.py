"""One accepted request, from its acceptance to the last byte of its answer.

Whatever goes wrong in between, exactly one of three things happens: the answer is complete; the
caller is told an error; or the caller is gone. In the last two this reader leaves the request: when
it was the only one, the request is cancelled, so that nobody computes what nobody hears, or kept
for as long as its caller asked for. When this gateway restarts it is kept for as long as that of a
gateway that died. No database connection is held while an answer is sent.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence

from redis.exceptions import RedisError
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.answer import Answer
from api.breakage import Breakage
from api.entrance import Entrance, entered
from api.envelope import began_at
from api.gateway import Gateway
from api.http_protocol import ON_RESET
from api.whole_answer import WholeAnswer
from control.errors import Restarting, ServiceError

# A gateway that died is missed for so long.
ORPHAN_GRACE_S = 15
RESTART_RETRY_MS = 1000
NUM_LEAVE_TRIES = 5
LEAVE_RETRY_S = 0.5

Header = tuple[bytes, bytes]

_log = logging.getLogger("headrace.gateway")


class GenerationResponse(Response):
    """Tells an answer. After a hang-up its request lives on for `grace_s`.

    `breakage` notes what becomes of a request that nobody was told; `headers` are told, too.
    """

    def __init__(
        self,
        gateway: Gateway,
        entrance: Entrance,
        answer: Answer,
        breakage: Breakage,
        grace_s: int = 0,
        headers: Sequence[Header] = (),
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._entrance = entrance
        self._answer = answer
        self._breakage = breakage
        self._grace_s = grace_s
        self._more_headers = headers
        self._began_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the end, or until the caller hangs up."""
        self._began_at = began_at(scope)
        if isinstance(self._answer, WholeAnswer):
            scope["state"][ON_RESET] = self._note_unread
        await _unless_disconnected(receive, self._serve(self._sender(send)))

    def _note_unread(self) -> None:
        """The answer was written and not read: a caller that repeats the call is given it again.

        It stays on the invoice: what was read of it nobody knows.
        """
        if self._answer.is_started and self._breakage.body_hash is not None:
            self._gateway.start(self._breakage.note(was_heard=True))

    def _sender(self, send: Send) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A caller who has left by now is not told, and what it was not told is noted.
                await asyncio.sleep(0)
                message["headers"] = [*message["headers"], *self._more_headers]
                if self._entrance.is_undelivered:
                    self._gateway.start(self._breakage.note_heard())
            await send(message)

        return send_with_headers

    async def _serve(self, send: Send) -> None:
        model, request_id = self._entrance.model, self._entrance.request_id
        with self._gateway.drain.watching():
            try:
                async with self._gateway.follower.subscribe(model, request_id) as subscription:
                    entering = asyncio.create_task(self._entrance.enter(subscription))
                    await entered(entering)
                    await self._answer.run(subscription, send)
                self._note_first_words()
            except asyncio.CancelledError:
                if not self._gateway.drain.is_over:
                    self._leave(entering, self._grace_s, is_broken=True)
                    raise
                grace_s = max(self._grace_s, ORPHAN_GRACE_S)
                self._leave(entering, grace_s, is_broken=True)
                _uncancel()
                message = "This gateway is restarting. Repeat the request, or resume its stream."
                restarting = Restarting(message, retry_after_ms=RESTART_RETRY_MS)
                await self._answer.fail(restarting, send)
            except ServiceError as error:
                self._leave(entering, self._grace_s)
                await self._answer.fail(error, send)
            except BaseException:
                self._leave(entering, self._grace_s)
                raise

    def _note_first_words(self) -> None:
        words_at = self._answer.words_at
        if words_at is not None and not self._entrance.is_known:
            self._gateway.first_words.note(self._entrance.request_id, words_at - self._began_at)

    def _leave(
        self, entering: "asyncio.Task[None]", grace_s: int, *, is_broken: bool = False
    ) -> None:
        """Leave the request, in the background: the caller need not wait, or is gone."""
        is_unheard = is_broken and not self._answer.is_started
        self._gateway.start(self._leave_surely(entering, grace_s, is_unheard=is_unheard))

    async def _leave_surely(
        self, entering: "asyncio.Task[None]", grace_s: int, *, is_unheard: bool
    ) -> None:
        # To leave what is not entered yet would find nothing to leave.
        await asyncio.gather(entering, return_exceptions=True)
        if not self._entrance.is_following:
            return
        model, request_id = self._entrance.model, self._entrance.request_id
        for _ in range(NUM_LEAVE_TRIES):
            try:
                is_left = await self._gateway.follower.leave(model, request_id, grace_s)
            except (RedisError, OSError):
                await asyncio.sleep(LEAVE_RETRY_S)
                continue
            if is_unheard and is_left:
                await self._breakage.note(was_heard=False)
            return
        _log.warning("request %s could not be left: Redis is away", request_id)


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
