"""An answer that is sent at once, when the request has ended."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.types import Send

from control.errors import DeadlineExceeded, ServiceError
from control.protocol.answer_contents import AnswerContents
from control.protocol.error_object import ending_of
from control.protocol.responses import FinishedChoice, ReplyHead, whole_reply
from control.streams.follower import Subscription
from engine.interface.generation_delta import FinishReason, GenerationDelta


@dataclass(slots=True)
class WholeAnswer:
    """Collects what each choice says."""

    head: ReplyHead
    num_choices: int
    contents: AnswerContents
    is_started: bool = field(default=False, init=False)
    # Its first words are told with its last.
    words_at: None = field(default=None, init=False)
    _deltas: dict[int, list[GenerationDelta]] = field(default_factory=dict, init=False)

    async def run(self, subscription: Subscription, send: Send) -> None:
        """Wait for the ending and send the answer, or raise the error that it ended with."""
        while True:
            delta = await subscription.next()
            assert delta is not None
            self._deltas.setdefault(delta.choice, []).append(delta)
            if delta.is_last:
                await self._send(delta, send)
                return

    async def fail(self, error: ServiceError, send: Send) -> None:
        """Nothing was sent, so the error is the whole answer."""
        del send
        raise error

    async def _send(self, last: GenerationDelta, send: Send) -> None:
        assert last.usage is not None
        if last.error is not None:
            # What was said before the deadline is worth more to the caller than an error.
            is_cut = last.error == DeadlineExceeded.code and last.usage.completion_tokens > 0
            if not is_cut:
                raise ending_of(last.error, last.usage if last.usage.completion_tokens else None)
        choices = [
            _finished(choice, self._deltas.get(choice, ())) for choice in range(self.num_choices)
        ]
        # Not on the loop: many logprobs are much to write.
        work = partial(whole_reply, self.head, choices, last.usage, last.error, self.contents)
        body = await asyncio.to_thread(work) if self.contents.is_detailed else work()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.is_started = True
        await send({"type": "http.response.body", "body": body})


def _finished(choice: int, deltas: Sequence[GenerationDelta]) -> FinishedChoice:
    """The choice's deltas as one."""
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    scored = (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None)
    reasons = (d.finish_reason for d in deltas if d.finish_reason is not None)
    return FinishedChoice(
        choice,
        "".join(delta.text for delta in deltas),
        next(reasons, FinishReason.LENGTH),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs if has_logprobs else None,
        next(scored, None),
    )
