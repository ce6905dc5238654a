"""What a stream says of its usage when nobody else can."""

import json
from datetime import UTC, datetime

from starlette.types import Message

from api.streaming import StreamAnswer
from control.protocol.responses import COMPLETION, ChunkEncoder, ReplyHead
from control.registry.model_version import ModelVersion
from control.streams.follower import Subscription
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import GenerationDelta


async def test_a_lost_requests_usage_is_what_came() -> None:
    version = ModelVersion("m", "v1", "d" * 64, "", 100, 50, datetime.now(UTC), True)
    head = ReplyHead(COMPLETION, "0" * 26, 0, version)
    encoder = ChunkEncoder(head, includes_usage=False, has_continuous_usage=False)
    answer = StreamAnswer(
        encoder=encoder, includes_usage=False, num_choices=1, prompt_tokens=7, heartbeat_s=5
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
