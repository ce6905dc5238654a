"""An answer as server-sent events.

    role chunk of each choice · words · end of each choice · [usage] · [error] · [DONE]

Nothing is sent before the first words or the first silence, so a request that ends before it
said anything is answered with a status code, which clients know to retry. One event is one data
line and a blank line; there are no ids, comments or empty events, because some client fails on
each of them.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import Send

from control.errors import RequestLost, ServiceError
from control.protocol.answer_contents import AnswerContents
from control.protocol.error_object import ending_of, face_of
from control.protocol.responses import DONE, ChunkEncoder, error_event
from control.streams.follower import Subscription
from engine.interface.generation_delta import GenerationDelta, Usage

# So many entries take a few milliseconds at most.
MANY_LOGPROBS = 64

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(slots=True)
class StreamAnswer:
    """One stream. After `heartbeat_s` of silence a chunk that says nothing is sent."""

    encoder: ChunkEncoder
    includes_usage: bool
    num_choices: int
    prompt_tokens: int
    heartbeat_s: float
    contents: AnswerContents | None = None
    is_started: bool = field(default=False, init=False)
    _num_tokens: int = field(default=0, init=False)

    async def run(self, subscription: Subscription, send: Send) -> None:
        """Send everything up to the request's ending. Raises the ending if nothing was sent yet."""
        while True:
            delta = await subscription.next(self.heartbeat_s)
            if delta is None:
                await self._write(send, self._opening() or self.encoder.heartbeat())
                continue
            if delta.error is not None and not self.is_started and not delta.text:
                raise ending_of(delta.error)
            opening = self._opening()
            events = opening + await self._rendered(delta)
            if events:
                await self._write(send, events, is_last=delta.is_last)
            if delta.is_last:
                return

    async def fail(self, error: ServiceError, send: Send) -> None:
        """End a stream that has begun with an error frame; before that, raise the error."""
        if not self.is_started:
            raise error
        usage = Usage(self.prompt_tokens, self._num_tokens)
        await self._write(send, error_event(face_of(error).body, usage) + DONE, is_last=True)

    async def _rendered(self, delta: GenerationDelta) -> bytes:
        """The delta's events; a long prompt's logprobs are much to write, and not on the loop."""
        if len(delta.prompt_logprobs or ()) < MANY_LOGPROBS:
            return self._events_of(delta)
        return await asyncio.to_thread(self._events_of, delta)

    def _opening(self) -> bytes:
        """What opens each choice, once."""
        if self.is_started:
            return b""
        return b"".join(map(self.encoder.first, range(self.num_choices)))

    def _events_of(self, delta: GenerationDelta) -> bytes:
        self._num_tokens = max(self._num_tokens, delta.offset + len(delta.token_ids))
        so_far = Usage(self.prompt_tokens, self._num_tokens)
        events = b""
        shown = None if delta.is_last or self.contents is None else self.contents.show(delta)
        if shown is None and delta.text:
            events += self.encoder.text(delta.choice, delta.text, so_far)
        elif shown is not None and shown.says_something:
            events += self.encoder.text(delta.choice, shown.text, so_far, shown.members)
        if delta.finish_reason is not None:
            events += self.encoder.finish(delta.choice, delta.finish_reason, so_far)
        if delta.usage is None:
            return events
        # Of a lost request nobody knows the usage but who counted what came.
        usage = so_far if delta.error == RequestLost.code else delta.usage
        if self.includes_usage:
            events += self.encoder.usage(usage)
        if delta.error is not None:
            events += error_event(face_of(ending_of(delta.error)).body, usage)
        return events + DONE

    async def _write(self, send: Send, events: bytes, *, is_last: bool = False) -> None:
        if not self.is_started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self.is_started = True
        await send({"type": "http.response.body", "body": events, "more_body": not is_last})
