"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from control.protocol.generation_fields import GenerationFields
from control.protocol.strict_model import (
    ShortText,
    StrictModel,
    Unserved,
    invalid,
    only,
    unsupported,
)
from control.protocol.template_fields import TemplateOptions
from engine.interface.chat_options import ChatOptions

_UNSERVED_ROLES = ("tool", "function")


def _check_role(role: object) -> object:
    if role in _UNSERVED_ROLES:
        raise unsupported("Tools are not served yet.")
    return role


def _check_part_type(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise unsupported("Only text is served, no images, sounds or files.")
    return kind


def _as_parts(content: object) -> object:
    """A string is one text part; anything but a string or a list is refused here."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid("Must be a string or an array of text parts.")
    return content


Role = Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_check_role)]


class TextPart(StrictModel):
    """A piece of a message."""

    type: Annotated[Literal["text"], BeforeValidator(_check_part_type)]
    text: str

    # Known, so that what is told of an image or a sound is its type.
    image_url: Unserved = None
    input_audio: Unserved = None
    file: Unserved = None


Content = Annotated[
    list[TextPart],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
]


class ChatMessage(StrictModel):
    """One message. Answers of ours can be sent back as they came: their null fields are known."""

    role: Role
    content: Content
    name: ShortText | None = None

    refusal: Unserved = None
    audio: Unserved = None
    annotations: Annotated[Any, only([])] = None
    function_call: Unserved = None
    tool_calls: Annotated[Any, only([])] = None
    tool_call_id: Unserved = None

    @property
    def text(self) -> str:
        """The whole content."""
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationFields):
    """A chat completion as asked for."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = None
    store: Annotated[Any, only(False)] = None

    echo: Annotated[Any, only(False)] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Unserved = None
    prediction: Unserved = None
    reasoning_effort: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None
    prompt_cache_retention: Unserved = None
    add_special_tokens: Annotated[Any, only(False)] = None
    chat_template: Unserved = None
    documents: Unserved = None

    @model_validator(mode="after")
    def _check_limits_agree(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("Differs from max_completion_tokens; send one of them.", "max_tokens")
        return self

    @model_validator(mode="after")
    def _check_ending_of_prompt(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "Not allowed with add_generation_prompt: the last message goes on, or another "
                "one begins.",
                "continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("Only allowed when logprobs is true.", "top_logprobs")
        return self

    @property
    def chat_options(self) -> ChatOptions:
        """How the prompt is written down."""
        continues = bool(self.continue_final_message)
        return ChatOptions(
            add_generation_prompt=self.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            template_kwargs=self.chat_template_kwargs or {},
        )

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer's text goes on where the prompt's ended."""
        return bool(self.continue_final_message)

    @property
    def max_output(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output."""
        if self.max_completion_tokens is None and self.max_tokens is not None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed at each token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def own_names(self) -> Mapping[str, str]:
        """What the caller calls fields of SamplingParams, where that differs."""
        return {"max_tokens": self.max_output[0], "logprobs": "top_logprobs"}
