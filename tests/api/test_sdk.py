"""The official OpenAI client against a live gateway."""

import openai
import pytest

from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import Run, ScriptedReplica

USER = [{"role": "user", "content": "hi"}]


def test_a_chat_is_answered(sdk: openai.OpenAI, served: Served, replica: ScriptedReplica) -> None:
    answer = sdk.chat.completions.create(model=served.model, messages=USER)  # type: ignore[call-overload]  # plain dicts
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == f"{served.model}@v1"
    assert answer.usage.completion_tokens == 2
    assert answer._request_id == "req_" + answer.id.removeprefix("chatcmpl-")
