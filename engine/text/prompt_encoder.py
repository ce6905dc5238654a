"""Turns conversations and raw prompts into token ids.

A chat prompt is rendered by the model's template, cut at the template's control tokens and
encoded piece by piece: control tokens by id, text as plain text. The template writes BOS when
the model wants one, so none is added. Text that cannot fit is refused before any work is done
on it, and long text is encoded off the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from engine.interface.errors import InvalidRequest
from engine.text.chat_template import ChatToRender
from engine.text.control_tokens import ControlTokens, unused_marker
from engine.text.template_process import TemplateFailure, TemplateRenderer
from engine.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# About two milliseconds of work; a thread's hand-over costs a tenth of one.
_MAX_INLINE_CHARS = 8 * 1024

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; content parts are already joined to one string."""

    role: str
    content: str
    name: str | None = None


class PromptEncoder:
    """Encodes for one model. Safe to share between tasks of one or several event loops."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: TemplateRenderer, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._control = ControlTokens(tokenizer.added_tokens)

    async def encode_chat(
        self, messages: Sequence[ChatMessage], now: datetime, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of the conversation, as the model's template writes it.

        `now` is the date that a template may print. Raises InvalidRequest for messages that
        break a rule, or that the template refuses; TemplateFailure when the template fails.
        """
        template = self._tokenizer.chat_template
        if template is None:
            message = "This model has no chat template; send raw prompts to /v1/completions."
            raise InvalidRequest(message, param="model", code="chat_not_supported")
        self._check_messages(messages)
        num_chars = sum(len(message.content) for message in messages)
        protected, marker = await _off_loop_if_long(
            lambda: self._protect(messages, template), num_chars
        )
        chat = ChatToRender(
            messages=protected,
            now=now,
            add_generation_prompt=add_generation_prompt,
            special_texts=self._tokenizer.special_texts,
        )
        prompt = await self._renderer.render(template, chat)
        if not _is_encodable(prompt):
            raise TemplateFailure("The chat template wrote half of a surrogate pair.")
        return await _off_loop_if_long(lambda: self._encode_rendered(prompt, marker), len(prompt))

    async def encode_completion(
        self, prompt: str, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a raw prompt; control tokens inside it are plain text."""
        if not _is_encodable(prompt):
            raise InvalidRequest("The prompt holds half of a surrogate pair.", param="prompt")
        self._check_length(len(prompt.encode()), "prompt")
        encode = self._tokenizer.encode_prompt
        return await _off_loop_if_long(lambda: encode(prompt, add_special_tokens), len(prompt))

    def is_certainly_too_long(self, text_bytes: int) -> bool:
        """True if so many bytes cannot fit, even were each token the vocabulary's longest."""
        return text_bytes > self._max_model_len * self._tokenizer.longest_token_bytes

    def _check_length(self, text_bytes: int, param: str) -> None:
        if self.is_certainly_too_long(text_bytes):
            raise InvalidRequest(
                f"This model's context is {self._max_model_len} tokens; "
                f"{text_bytes} bytes of text cannot fit.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_messages(self, messages: Sequence[ChatMessage]) -> None:
        if not messages:
            raise InvalidRequest("messages holds at least one message.", param="messages")
        for place, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequest(
                    f"{message.role!r} is not a role.", param=f"messages[{place}].role"
                )
            if not all(map(_is_encodable, _parts(message))):
                raise InvalidRequest(
                    "The text holds half of a surrogate pair.",
                    param=f"messages[{place}].content",
                )
        self._check_length(sum(len(m.content.encode()) for m in messages), "messages")

    def _protect(
        self, messages: Sequence[ChatMessage], template: str
    ) -> tuple[list[dict[str, str]], str]:
        """The messages with every control token in them broken, and the marker that did it."""
        marker = unused_marker([template, *(part for m in messages for part in _parts(m))])
        if marker is None:
            reason = "The messages use every private-use character of Unicode."
            raise InvalidRequest(reason, param="messages")
        protected = []
        for message in messages:
            content = self._control.break_up(message.content, marker)
            fields = {"role": message.role, "content": content}
            if message.name is not None:
                fields["name"] = self._control.break_up(message.name, marker)
            protected.append(fields)
        return protected, marker

    def _encode_rendered(self, prompt: str, marker: str) -> tuple[int, ...]:
        token_ids: list[int] = []
        for segment in self._control.split(prompt, marker):
            if segment.text:
                is_first = not token_ids
                token_ids.extend(self._tokenizer.encode_plain(segment.text, at_start=is_first))
            if segment.token is not None:
                token_ids.append(segment.token.token_id)
        return tuple(token_ids)


def _parts(message: ChatMessage) -> tuple[str, ...]:
    return (message.content, message.name or "")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _off_loop_if_long(work: Callable[[], _Result], num_chars: int) -> _Result:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)
