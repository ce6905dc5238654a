"""What a stream does when nobody else can: count what came, and write while others are served."""

import asyncio
import json
import threading
from datetime import UTC, datetime

from starlette.types import Message

from api.streaming import MANY_LOGPROBS, StreamAnswer
from control.protocol.answer_contents import AnswerContents, Shown
from control.protocol.responses import COMPLETION, ChunkEncoder, ReplyHead
from control.registry.model_version import ModelVersion
from control.streams.follower import Subscription
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta, Usage
from engine.interface.token_logprobs import TokenLogprob


class SlowContents(AnswerContents):
    """Does not end before somebody else on the loop was served."""

    def __init__(self, others_were_served: threading.Event) -> None:
        self._others_were_served = others_were_served

    def show(self, piece: object) -> Shown:
        assert self._others_were_served.wait(10), "the loop stood still meanwhile"
        return Shown("long", {}, says_something=True)


def encoder() -> ChunkEncoder:
    version = ModelVersion("m", "v1", "d" * 64, "", 100, 50, datetime.now(UTC), True)
    head = ReplyHead(COMPLETION, "0" * 26, 0, version)
    return ChunkEncoder(head, includes_usage=False, has_continuous_usage=False)


async def test_others_are_served_while_a_long_prompts_logprobs_are_written() -> None:
    others_were_served = threading.Event()
    answer = StreamAnswer(
        encoder=encoder(),
        includes_usage=False,
        num_choices=1,
        prompt_tokens=7,
        heartbeat_s=5,
        contents=SlowContents(others_were_served),
    )
    subscription = Subscription(ModelKeys("m"), "r")
    scores = (TokenLogprob(-1.0),) * MANY_LOGPROBS
    subscription.put(GenerationDelta("r", 0, 0, 0, (1,), "a", prompt_logprobs=scores))
    subscription.put(GenerationDelta("r", 0, 1, 1, usage=Usage(7, 1)))
    sent = b""

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    async def serve_others() -> None:
        others_were_served.set()

    await asyncio.gather(answer.run(subscription, send), serve_others())
    assert b'"text":"long"' in sent
    assert sent.endswith(b"data: [DONE]\n\n")


async def test_a_lost_requests_usage_is_what_came() -> None:
    answer = StreamAnswer(
        encoder=encoder(), includes_usage=False, num_choices=1, prompt_tokens=7, heartbeat_s=5
    )
    subscription = Subscription(ModelKeys("m"), "r")
    subscription.put(GenerationDelta("r", 0, 0, 0, (1, 2, 3), "abc"))
    subscription.put_lost()
    sent = b""

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    await answer.run(subscription, send)
    *_, error, done = [line for line in sent.decode().splitlines() if line]
    assert done == "data: [DONE]"
    frame = json.loads(error.removeprefix("data: "))
    assert frame["error"]["code"] == "request_lost"
    assert frame["x_usage"]["prompt_tokens"] == 7
    assert frame["x_usage"]["completion_tokens"] == 3
