"""How an answer is to be told: what any gateway must know to tell it, and tell it again.

It is kept with the request, so that a stream can go on at another gateway than the one that
accepted it. Prompts are in it only where the answer shows them.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import msgspec

from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.logprob_objects import Reader
from control.protocol.shown_fields import Details
from engine.interface.generation_request import GenerationRequest
from engine.interface.text_options import TextOptions

Fields = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of one answer.

    `n` is the choices of one prompt, `num_choices` those of all. `prompt_texts` are what `echo`
    puts before the words, one per prompt. `grace_s` is how long its request lives on after its
    last reader left.
    """

    is_chat: bool
    is_stream: bool = False
    includes_usage: bool = False
    has_continuous_usage: bool = False
    details: Details = field(default_factory=Details)
    text: TextOptions = field(default_factory=TextOptions)
    n: int = 1
    num_choices: int = 1
    prompts: tuple[tuple[int, ...], ...] = ()
    prompt_texts: tuple[str, ...] = ()
    grace_s: int = 0

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """The prompt that the given choice continues."""
        return self.prompts[choice // self.n]

    def streamed(self) -> Self:
        """The same answer as a stream."""
        return replace(self, is_stream=True)

    def told_as(self, fields: Fields) -> Self:
        """The same answer, streamed or not as a repetition of its request wants it."""
        return replace(
            self,
            is_stream=bool(fields.stream),
            includes_usage=fields.includes_usage,
            has_continuous_usage=fields.has_continuous_usage,
        )


def form_of(fields: Fields, request: GenerationRequest, reader: Reader) -> AnswerForm:
    """The form of the answer to a request, valid by its own law, that was made of `fields`."""
    details = fields.details
    shows_prompts = details.token_ids or details.echo or details.num_prompt_logprobs is not None
    texts: list[str] = []
    if isinstance(fields, CompletionRequest) and details.echo:
        # What was not sent as text is read back.
        texts = [p if isinstance(p, str) else reader.prompt_text(p) for p in fields.prompts]
    return AnswerForm(
        is_chat=isinstance(fields, ChatRequest),
        is_stream=bool(fields.stream),
        includes_usage=fields.includes_usage,
        has_continuous_usage=fields.has_continuous_usage,
        details=details,
        text=request.text,
        n=request.sampling.n,
        num_choices=request.num_choices,
        prompts=request.prompts if shows_prompts else (),
        prompt_texts=tuple(texts),
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnswerForm)


def pack_form(form: AnswerForm) -> bytes:
    """The form as it is kept."""
    return _encoder.encode(form)


def unpack_form(data: bytes) -> AnswerForm:
    """Inverse of `pack_form`."""
    return _decoder.decode(data)
