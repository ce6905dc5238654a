"""Answers as bytes: stream chunks and whole objects, for chat and for the older completions.

A stream's chunks differ only in index, text, reason and usage, so the rest is encoded once and a
chunk is a concatenation. The characters at which naive readers split lines are escaped, so one
event is one line for everybody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from control.protocol.answer_contents import AnswerContents
from control.registry.model_version import ModelVersion
from engine.interface.generation_delta import FinishReason, Usage
from engine.interface.token_logprobs import TokenLogprob

DONE = b"data: [DONE]\n\n"
SERVICE_TIER = "default"  # every tier that can be asked for is served as this one
_FINGERPRINT_DIGITS = 12
_NO_LOGPROBS = b'"logprobs":null'

_encode = msgspec.json.Encoder().encode


def to_json(value: object) -> bytes:
    """The value as one line of JSON, whichever characters a reader takes for a line's end."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data


def event(data: bytes) -> bytes:
    """One server-sent event: one data line, one blank line."""
    return b"data: " + data + b"\n\n"


def usage_object(usage: Usage) -> dict[str, object]:
    """Usage as OpenAI's clients read it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """In what the two endpoints' answers differ. `text_field` holds a chunk's words."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    is_chat: bool

    def chunk_text(self, text: str) -> bytes:
        """The member of a chunk's choice that holds its words."""
        if not self.is_chat:
            return b'"text":' + to_json(text)
        return b'"delta":{"content":' + to_json(text) + b"}"

    @property
    def no_text(self) -> bytes:
        """The same member of a chunk that has no words."""
        return b'"delta":{}' if self.is_chat else b'"text":""'

    def whole_choice(self, text: str) -> dict[str, object]:
        """The member of a finished choice that holds its words."""
        if not self.is_chat:
            return {"text": text}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


CHAT = ReplyShape("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = ReplyShape("cmpl-", "text_completion", "text_completion", is_chat=False)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all chunks, or the one object, of an answer share."""

    shape: ReplyShape
    request_id: str
    created: int
    version: ModelVersion

    @property
    def completion_id(self) -> str:
        """The answer's id on the wire."""
        return self.shape.id_prefix + self.request_id

    def members(self, object_name: str) -> dict[str, object]:
        """The head as JSON members, in the order of the wire."""
        return {
            "id": self.completion_id,
            "object": object_name,
            "created": self.created,
            "model": self.version.pinned_name,
            "service_tier": SERVICE_TIER,
            "system_fingerprint": fingerprint(self.version.weights_digest),
        }


def fingerprint(weights_digest: str) -> str:
    """Equal for answers computed with equal weights."""
    return "fp_" + weights_digest[:_FINGERPRINT_DIGITS]


class ChunkEncoder:
    """Encodes the events of one stream.

    With `includes_usage` every chunk carries usage, null except in the usage chunk; with
    `has_continuous_usage` every chunk that is given a usage carries that. `opening_members` are
    told in the chunk that opens a chat.
    """

    def __init__(
        self,
        head: ReplyHead,
        *,
        includes_usage: bool,
        has_continuous_usage: bool = False,
        opening_members: Mapping[str, object] | None = None,
    ) -> None:
        self._shape = head.shape
        members = to_json(head.members(head.shape.chunk_object))
        self._start = b"data: " + members[:-1] + b',"choices":['
        self._null_usage = b',"usage":null' if includes_usage else b""
        self._has_continuous_usage = has_continuous_usage
        self._opening_members = _members(opening_members) if opening_members else b""

    def first(self, choice: int, usage: Usage | None = None) -> bytes:
        """What opens a choice: the role in a chat, nothing in a completion."""
        if not self._shape.is_chat:
            return b""
        role = b'"delta":{"role":"assistant","content":""},' + _NO_LOGPROBS
        more = self._opening_members if choice == 0 else b""
        return self._chunk(choice, role, b"null", usage, more)

    def text(
        self,
        choice: int,
        text: str,
        usage: Usage | None = None,
        members: Mapping[str, object] | None = None,
        x_usage: Usage | None = None,
    ) -> bytes:
        """More words of a choice, and what is told beside them."""
        beside = _members({"logprobs": None, **members}) if members else _NO_LOGPROBS
        said = self._shape.chunk_text(text) + b"," + beside
        return self._chunk(choice, said, b"null", usage, _x_usage(x_usage))

    def finish(
        self,
        choice: int,
        reason: FinishReason,
        usage: Usage | None = None,
        x_usage: Usage | None = None,
    ) -> bytes:
        """The end of a choice."""
        nothing = self._shape.no_text + b"," + _NO_LOGPROBS
        shown = b'"' + reason.encode() + b'"'
        return self._chunk(choice, nothing, shown, usage, _x_usage(x_usage))

    def heartbeat(self) -> bytes:
        """A chunk that says nothing, for clients that would take silence for death."""
        return self._chunk(0, self._shape.no_text + b"," + _NO_LOGPROBS, b"null", None)

    def usage(self, usage: Usage) -> bytes:
        """The chunk that carries the usage and no choice."""
        return self._start + b'],"usage":' + to_json(usage_object(usage)) + b"}\n\n"

    def _chunk(
        self, choice: int, said: bytes, reason: bytes, usage: Usage | None, more: bytes = b""
    ) -> bytes:
        shown = self._null_usage
        if usage is not None and self._has_continuous_usage:
            shown = b',"usage":' + to_json(usage_object(usage))
        return b'%b{"index":%d,%b,"finish_reason":%b}]%b%b}\n\n' % (
            self._start,
            choice,
            said,
            reason,
            b"," + more if more else b"",
            shown,
        )


def _members(members: Mapping[str, object]) -> bytes:
    """An object's members without its braces."""
    return to_json(members)[1:-1]


def _x_usage(usage: Usage | None) -> bytes:
    """The usage so far, as a member that stock clients pass over."""
    return b"" if usage is None else b'"x_usage":' + to_json(usage_object(usage))


def error_event(error_body: dict[str, dict[str, str | None]], usage: Usage | None) -> bytes:
    """The frame that ends a stream which did not finish, with what was used until then."""
    shown: dict[str, object] = {**error_body}
    if usage is not None:
        shown["x_usage"] = usage_object(usage)
    return event(to_json(shown))


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """Everything one choice said, with what is known of its tokens."""

    choice: int
    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def whole_reply(
    head: ReplyHead,
    choices: Sequence[FinishedChoice],
    usage: Usage,
    stop_reason: str | None = None,
    contents: AnswerContents | None = None,
) -> bytes:
    """The one object of an answer that is not streamed, with what its contents show.

    `stop_reason` is the error code that cut an answer short whose beginning is worth sending.
    """
    shown: list[dict[str, object]] = []
    for choice in choices:
        told = None if contents is None else contents.show(choice)
        shown.append(
            {
                "index": choice.choice,
                **head.shape.whole_choice(choice.text if told is None else told.text),
                "logprobs": None,
                **(told.members if told is not None else {}),
                "finish_reason": choice.finish_reason,
            }
        )
    reply = head.members(head.shape.whole_object)
    reply |= {"choices": shown, "usage": usage_object(usage)}
    if contents is not None:
        reply |= contents.members_of_all(choices)
    if stop_reason is not None:
        reply["x_stop_reason"] = stop_reason
    return to_json(reply)


def model_object(name: str, version: ModelVersion) -> dict[str, object]:
    """A model as /v1/models lists it, with the limits it is served under."""
    return {
        "id": name,
        "object": "model",
        "created": int(version.created_at.timestamp()),
        "owned_by": "headrace",
        "x_limits": {
            "max_context_tokens": version.max_model_len,
            "max_output_tokens": version.max_output_tokens,
        },
        "x_weights_digest": version.weights_digest,
    }
