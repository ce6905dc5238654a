"""How a caller may have a conversation written down, and what of it stays ours."""

from typing import Any

import openai
import pytest

from tests.api.conftest import Served
from tests.api.scripted_replica import ScriptedReplica
from workers.scripted_model import CONTROL_TOKENS

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "Sure: <|im_end|>"}


def ask(sdk: openai.OpenAI, served: Served, messages: Any, **fields: Any) -> None:
    sdk.chat.completions.create(model=served.model, messages=messages, extra_body=fields)


def prompt_of(replica: ScriptedReplica) -> str:
    """The prompt of the latest request, its control tokens in brackets."""
    names = dict(zip(range(256, 259), CONTROL_TOKENS, strict=True))
    pieces = [
        f"[{names[i]}]".encode() if i in names else bytes([i])
        for i in replica.latest().request.prompts[0]
    ]
    replica.forget()
    return b"".join(pieces).decode()


ASSISTANT = "[<|im_start|>]assistant\n"
HI = "[<|im_start|>]user\nhi[<|im_end|>]\n"


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, ASSISTANT),
        ({"add_generation_prompt": True, "continue_final_message": False}, ASSISTANT),
        ({"add_generation_prompt": None, "chat_template_kwargs": {}}, ASSISTANT),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_a_prompt_opens_the_answer_unless_told_not_to(
    sdk: openai.OpenAI,
    served: Served,
    replica: ScriptedReplica,
    fields: dict[str, Any],
    ending: str,
) -> None:
    ask(sdk, served, [USER], **fields)
    assert prompt_of(replica) == HI + ending


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_the_assistants_last_message_goes_on(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica, fields: dict[str, Any]
) -> None:
    ask(sdk, served, [USER, BEGUN], continue_final_message=True, **fields)
    assert prompt_of(replica) == HI + ASSISTANT + "Sure: <|im_end|>"
    parts = [{"type": "text", "text": "Sure"}, {"type": "text", "text": ": "}]
    begun = {"role": "assistant", "content": parts}
    ask(sdk, served, [USER, begun], continue_final_message=True, **fields)
    assert prompt_of(replica) == HI + ASSISTANT + "Sure: "


def test_a_developer_speaks_as_the_system(
    sdk: openai.OpenAI, served: Served, replica: ScriptedReplica
) -> None:
    ask(sdk, served, [{"role": "developer", "content": "Be brief."}, USER])
    assert prompt_of(replica).startswith("[<|im_start|>]system\nBe brief.[<|im_end|>]\n")


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        (
            [USER, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ([BEGUN, USER], {"continue_final_message": True}, "continue_final_message"),
        ([USER], {"continue_final_message": 1}, "continue_final_message"),
        ([USER], {"add_generation_prompt": "no"}, "add_generation_prompt"),
        ([USER], {"chat_template": "{{ 'a' * 10**9 }}"}, "chat_template"),
        ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, "…"),
        ([USER], {"chat_template_kwargs": {"messages": None}}, "…"),
        ([USER], {"chat_template_kwargs": {"chat_template": "x"}}, "…"),
        ([USER], {"chat_template_kwargs": {"a": {"b": 1}}}, "….a"),
        ([USER], {"chat_template_kwargs": {"a": 10**7}}, "….a"),
        ([USER], {"chat_template_kwargs": {"a": "x" * 257}}, "….a"),
        ([USER], {"chat_template_kwargs": {"a": 0.5}}, "….a"),
        ([USER], {"chat_template_kwargs": {"a b": 1}}, "…"),
        ([USER], {"chat_template_kwargs": {"x" * 41: 1}}, "…"),
        ([USER], {"chat_template_kwargs": {f"a{i}": 1 for i in range(17)}}, "…"),
        ([USER], {"chat_template_kwargs": ["a"]}, "…"),
        ([{"role": "oracle", "content": "x"}], {}, "messages[0].role"),
    ],
)
def test_what_is_not_the_callers_to_say_is_refused(
    sdk: openai.OpenAI,
    served: Served,
    replica: ScriptedReplica,
    messages: Any,
    fields: dict[str, Any],
    param: str,
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(sdk, served, messages, **fields)
    assert refusal.value.param == param.replace("…", "chat_template_kwargs")
    assert not replica.runs
