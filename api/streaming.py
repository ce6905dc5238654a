"""An answer as server-sent events.

    role chunk of each choice · words · end of each choice · [usage] · [error] · [DONE]

Nothing is sent before the first words or the first silence, so a request that ends before it
said anything is answered with a status code, which clients know to retry. One event is one data
line and a blank line; there are no comments or empty events, because some client fails on each of
them. Ids are for readers that asked for them (`api.event_labels`); of what this gateway says of
its own accord (heartbeats, that it restarts) and of `[DONE]` there are none.
"""

import asyncio
import time
from dataclasses import dataclass, field

from starlette.types import Send

from api.event_labels import EventLabels
from control.errors import RequestLost, ServiceError
from control.protocol.answer_contents import AnswerContents
from control.protocol.error_object import ending_of, face_of
from control.protocol.responses import DONE, ChunkEncoder, error_event
from control.streams.follower import Subscription
from engine.interface.generation_delta import GenerationDelta, Usage

# So many entries take a few milliseconds at most.
MANY_LOGPROBS = 64
# A stream with ids tells the usage so far about each time so many tokens have come.
X_USAGE_EVERY = 64

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
    labels: EventLabels | None = None
    is_started: bool = field(default=False, init=False)
    # The monotonic second at which the first words were told.
    words_at: float | None = field(default=None, init=False)
    _has_opened: bool = field(default=False, init=False)
    _num_tokens: int = field(default=0, init=False)

    async def run(self, subscription: Subscription, send: Send) -> None:
        """Send everything up to the request's ending. Raises the ending if nothing was sent yet."""
        while True:
            delta = await subscription.next(self.heartbeat_s)
            if delta is None:
                await self._write(send, self._opening() or self.encoder.heartbeat())
                continue
            if delta.error is not None and not delta.text and not self._is_under_way:
                raise ending_of(delta.error)
            opening = self._opening()
            events = opening + await self._rendered(delta)
            if events:
                await self._write(send, events, is_last=delta.is_last)
                if delta.token_ids:
                    self.words_at = self.words_at or time.monotonic()
            if delta.is_last:
                return

    async def fail(self, error: ServiceError, send: Send) -> None:
        """End a stream that has begun with an error frame; before that, raise the error."""
        if not self._is_under_way:
            raise error
        usage = Usage(self.prompt_tokens, self._num_tokens)
        events = self.encoder.usage(usage) if self.includes_usage else b""
        events += error_event(face_of(error).body, usage) + DONE
        await self._write(send, events, is_last=True)

    @property
    def _is_under_way(self) -> bool:
        """Whether the reader has seen anything of the stream, here or before."""
        return self.is_started or (self.labels is not None and self.labels.after is not None)

    async def _rendered(self, delta: GenerationDelta) -> bytes:
        """The delta's events; a long prompt's logprobs are much to write, and not on the loop."""
        if len(delta.prompt_logprobs or ()) < MANY_LOGPROBS:
            return self._events_of(delta)
        return await asyncio.to_thread(self._events_of, delta)

    def _opening(self) -> bytes:
        """What opens each choice, once."""
        if self._has_opened:
            return b""
        self._has_opened = True
        return b"".join(self._labelled(self.encoder.first(i), 0) for i in range(self.num_choices))

    def _events_of(self, delta: GenerationDelta) -> bytes:
        before = self._num_tokens
        self._num_tokens = max(before, delta.offset + len(delta.token_ids))
        so_far = Usage(self.prompt_tokens, self._num_tokens)
        is_told = self.labels and before // X_USAGE_EVERY != self._num_tokens // X_USAGE_EVERY
        x_usage = so_far if is_told else None
        said = self._words(delta, so_far, x_usage)
        if delta.finish_reason is not None:
            x_usage = so_far if self.labels else None
            end = self.encoder.finish(delta.choice, delta.finish_reason, so_far, x_usage)
            said += self._labelled(end, self._num_tokens)
        return said if delta.usage is None else said + self._last_events(delta, delta.usage)

    def _words(self, delta: GenerationDelta, so_far: Usage, x_usage: Usage | None) -> bytes:
        shown = None if delta.is_last or self.contents is None else self.contents.show(delta)
        chunk = b""
        if shown is None and delta.text:
            chunk = self.encoder.text(delta.choice, delta.text, so_far, x_usage=x_usage)
        elif shown is not None and shown.says_something:
            chunk = self.encoder.text(delta.choice, shown.text, so_far, shown.members, x_usage)
        return self._labelled(chunk, self._num_tokens)

    def _last_events(self, delta: GenerationDelta, usage: Usage) -> bytes:
        # Of a lost request nobody knows the usage but who counted what came.
        if delta.error == RequestLost.code:
            usage = Usage(self.prompt_tokens, self._num_tokens)
        events = b""
        if self.includes_usage:
            events += self._labelled(self.encoder.usage(usage), self._num_tokens)
        if delta.error is not None:
            frame = error_event(face_of(ending_of(delta.error)).body, usage)
            events += self._labelled(frame, self._num_tokens)
        return events + DONE

    def _labelled(self, event: bytes, num_tokens: int) -> bytes:
        return event if self.labels is None else self.labels.label(event, num_tokens)

    async def _write(self, send: Send, events: bytes, *, is_last: bool = False) -> None:
        if not self.is_started:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self.is_started = True
        await send({"type": "http.response.body", "body": events, "more_body": not is_last})
