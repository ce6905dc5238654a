"""A call that may have been made before: it is given what the first one made, or makes it.

The first of many that race makes the request, under the key that they share; the others hear it,
from the beginning or from where they were. What failed before anybody heard of it is made anew,
and so is what broke off with its connection: it is on nobody's invoice.
"""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.completion_call import CompletionCall
from api.entrance import NeverQueued
from api.errors import told
from api.generation import GenerationResponse
from api.stored import reading, transaction
from control.admission.accepted import Accepted, read_accepted
from control.admission.broken import take_broken
from control.admission.idempotency import KEY_REUSED, KeptKey, find_key
from control.errors import KeyMoved, KeyReused, RequestInProgress, ServiceError
from control.identity.request_id import is_request_id

MAX_LOOKS = 100
LOOK_AGAIN_S = 0.05
IN_PROGRESS_RETRY_MS = 1000


class RepeatedCall(Response):
    """The answer to the call, whoever else makes it."""

    def __init__(self, call: CompletionCall) -> None:
        super().__init__()
        self._call = call
        self._accepted: Accepted | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Find out which request the call is for, as often as that changes, and answer."""
        response = await self._find()
        for _ in range(MAX_LOOKS):
            try:
                await response(scope, receive, send)
                return
            except KeyMoved:
                await asyncio.sleep(LOOK_AGAIN_S)
                response = await self._find()
            except NeverQueued:
                response = await self._call.new(adopted=self._accepted)
            except ServiceError as error:
                if not await self._has_failed_unheard():
                    await self._tell(error, scope, receive, send)
                    return
                response = await self._find()
        raise KeyMoved("Too many calls race for this key.", retry_after_ms=IN_PROGRESS_RETRY_MS)

    async def _tell(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell how the request failed. A repetition is told so, and that to repeat it is no use."""
        if self._accepted is None or not self._accepted.has_ended:
            raise error
        headers = {"idempotent-replayed": "true", "x-should-retry": "false"}
        await told(error, headers)(scope, receive, send)

    async def _find(self) -> GenerationResponse:
        """The response with the request that the call stands for now."""
        call, self._accepted = self._call, None
        if call.repetition.key is None:
            self._accepted = await self._broken()
            return await (call.new() if self._accepted is None else call.known(self._accepted))
        kept = await self._kept(call.repetition.key)
        if kept is None:
            return await call.new()
        if kept.body_hash != call.repetition.body_hash:
            raise KeyReused(KEY_REUSED)
        accepted = await self._read(kept.object_id)
        if accepted is None or accepted.form is None:
            # Given back: its key is, too.
            return await call.new(replaces=kept.object_id)
        if accepted.failed_unheard:
            return await call.new(replaces=kept.object_id)
        if call.repetition.prefers_async and not accepted.has_ended:
            raise _in_progress()
        self._accepted = accepted
        return await call.known(accepted)

    async def _kept(self, key: str) -> KeptKey | None:
        """What the key stands for here. Raises RequestInProgress if it is at work elsewhere."""
        call = self._call
        async with reading(call.gateway.database) as connection:
            found = await find_key(connection, call.caller.tenant_id, key)
        for kept in found:
            if kept.endpoint != call.endpoint and is_request_id(kept.object_id):
                other = await self._read(kept.object_id)
                if other is not None and not other.has_ended:
                    raise _in_progress()
        return next((kept for kept in found if kept.endpoint == call.endpoint), None)

    async def _broken(self) -> Accepted | None:
        """The request whose connection broke, if this is its one repetition."""
        call, repetition = self._call, self._call.repetition
        async with transaction(call.gateway.database) as connection:
            request_id = await take_broken(
                connection,
                call.caller.key_id,
                repetition.body_hash,
                repetition.within_s,
                call.gateway.mint_request_id(),
            )
        if request_id is None:
            return None
        accepted = await self._read(request_id)
        if accepted is None or accepted.form is None or accepted.error is not None:
            return None
        return accepted if accepted.endpoint == call.http_request.scope["path"] else None

    async def _read(self, request_id: str) -> Accepted | None:
        async with reading(self._call.gateway.database) as connection:
            return await read_accepted(connection, self._call.caller.tenant_id, request_id)

    async def _has_failed_unheard(self) -> bool:
        """Whether what was heard of a request that was under way was only that it failed."""
        if self._accepted is None or self._accepted.has_ended:
            return False
        accepted = await self._read(self._accepted.request_id)
        return accepted is not None and accepted.failed_unheard


def _in_progress() -> RequestInProgress:
    return RequestInProgress(
        "A request of this key is under way. Try again shortly.",
        retry_after_ms=IN_PROGRESS_RETRY_MS,
    )
