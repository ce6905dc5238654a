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

from engine.interface.chat_options import ChatOptions
from engine.interface.errors import InvalidRequest
from engine.text.chat_template import ChatToRender
from engine.text.control_tokens import ControlTokens
from engine.text.template_process import TemplateBusy, TemplateFailure, TemplateRenderer
from engine.text.tokenizer import Tokenizer
from engine.text.unfinished_message import Marks, check_continuable, cut_after

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

# About two milliseconds of work; a thread's hand-over costs a tenth of one.
_MAX_INLINE_CHARS = 8 * 1024

DEFAULTS = ChatOptions()

TokenIds = tuple[int, ...]
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
        self, messages: Sequence[ChatMessage], now: datetime, options: ChatOptions = DEFAULTS
    ) -> tuple[int, ...]:
        """Token ids of the conversation, as the model's template writes it.

        `now` is the date that a template may print. Raises InvalidRequest for messages or options
        that break a rule, or that the template refuses; TemplateFailure when the template fails.
        """
        template = self._tokenizer.chat_template
        if template is None:
            message = "This model has no chat template; send raw prompts to /v1/completions."
            raise InvalidRequest(message, param="model", code="chat_not_supported")
        self._check_messages(messages)
        if options.continue_final_message:
            check_continuable(messages[-1].role)
        num_chars = sum(len(message.content) for message in messages)
        chat, marks = await _off_loop_if_long(
            lambda: self._protected(messages, now, options, template), num_chars
        )
        prompt = await self._render(template, chat, marks)
        unfinished = messages[-1].content if options.continue_final_message else None
        return await _off_loop_if_long(
            lambda: self._encode_rendered(prompt, marks, unfinished), len(prompt)
        )

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

    def _protected(
        self,
        messages: Sequence[ChatMessage],
        now: datetime,
        options: ChatOptions,
        template: str,
    ) -> tuple[ChatToRender, Marks]:
        """What the template sees: every control token in callers' text is broken."""
        texts = [template, *(part for m in messages for part in _parts(m))]
        values = options.template_kwargs
        marks = Marks.unused_in([*texts, *(v for v in values.values() if isinstance(v, str))])
        if marks is None:
            reason = "The messages use every private-use character of Unicode."
            raise InvalidRequest(reason, param="messages")

        def broken(text: str) -> str:
            return self._control.break_up(text, marks.breaker)

        # Templates that do not know the newer name take the older one for the same thing.
        roles = {} if "developer" in template else {"developer": "system"}
        protected = []
        for message in messages:
            fields = {
                "role": roles.get(message.role, message.role),
                "content": broken(message.content),
            }
            if message.name is not None:
                fields["name"] = broken(message.name)
            protected.append(fields)
        if options.continue_final_message:
            protected[-1]["content"] += marks.end_of_unfinished
        chat = ChatToRender(
            messages=protected,
            now=now,
            add_generation_prompt=options.add_generation_prompt,
            special_texts=self._tokenizer.special_texts,
            options={k: broken(v) if isinstance(v, str) else v for k, v in values.items()},
        )
        return chat, marks

    async def _render(self, template: str, chat: ChatToRender, marks: Marks) -> str:
        try:
            prompt = await self._renderer.render(template, chat)
        except InvalidRequest as refusal:
            message = marks.removed_from(str(refusal))
            raise InvalidRequest(message, param=refusal.param, code=refusal.code) from None
        except TemplateBusy:
            raise
        except TemplateFailure as failure:
            if not chat.options:
                raise
            message = f"The model's chat template cannot be rendered with these options. {failure}"
            message = marks.removed_from(message)
            raise InvalidRequest(message, param="chat_template_kwargs") from failure
        if not _is_encodable(prompt):
            raise TemplateFailure("The chat template wrote half of a surrogate pair.")
        return prompt

    def _encode_rendered(self, prompt: str, marks: Marks, unfinished: str | None) -> TokenIds:
        if unfinished is not None:
            prompt = cut_after(prompt, unfinished, marks)
        token_ids: list[int] = []
        for segment in self._control.split(prompt, marks.breaker):
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
