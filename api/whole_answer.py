"""An answer that is sent at once, when the request has ended."""

from dataclasses import dataclass, field

from starlette.types import Send

from control.errors import DeadlineExceeded, ServiceError
from control.protocol.error_object import ending_of
from control.protocol.responses import FinishedChoice, ReplyHead, whole_reply
from control.streams.follower import Subscription
from engine.interface.generation_delta import FinishReason, GenerationDelta


@dataclass(slots=True)
class WholeAnswer:
    """Collects what each choice says."""

    head: ReplyHead
    num_choices: int
    _texts: dict[int, list[str]] = field(default_factory=dict, init=False)
    _reasons: dict[int, FinishReason] = field(default_factory=dict, init=False)

    async def run(self, subscription: Subscription, send: Send) -> None:
        """Wait for the ending and send the answer, or raise the error that it ended with."""
        while True:
            delta = await subscription.next()
            assert delta is not None
            self._texts.setdefault(delta.choice, []).append(delta.text)
            if delta.finish_reason is not None:
                self._reasons[delta.choice] = delta.finish_reason
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
                raise ending_of(last.error)
        choices = [
            FinishedChoice(
                choice,
                "".join(self._texts.get(choice, ())),
                self._reasons.get(choice, FinishReason.LENGTH),
            )
            for choice in range(self.num_choices)
        ]
        body = whole_reply(self.head, choices, last.usage, last.error)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
