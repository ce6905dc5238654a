"""From a line's body to what is queued, by the very steps that the gateway takes over HTTP.

Tokenizers are loaded once per process and version; chat templates run in one child of it, and
grammars are tried out in another.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from control.admission.reservation import Reservation
from control.errors import GenerationFailed, Overloaded
from control.protocol.accepted_request import Order, build_request, check_early, reserve
from control.protocol.answer_contents import AnswerContents, contents_of
from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.json_body import parse_object
from control.protocol.shown_fields import NO_DETAILS
from control.registry.manifest import ManifestError, verify_text_files
from control.registry.model_version import ModelVersion
from engine.grammar.grammar_checks import GrammarChecks
from engine.grammar.grammar_compiler import GrammarBusy
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest
from engine.text.prompt_encoder import ChatMessage, PromptEncoder
from engine.text.template_process import TemplateBusy, TemplateFailure, TemplateRenderer
from engine.text.token_reader import TokenReader
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerNotSupported

CHAT_ENDPOINT = "/v1/chat/completions"
RETRY_MS = 2000

log = logging.getLogger(__name__)


class LineRequests:
    """Builds requests from bodies, for every model version that a process comes to meet."""

    def __init__(self) -> None:
        self._renderer = TemplateRenderer()
        self._grammars = GrammarChecks()
        self._tokenizers: dict[str, Tokenizer] = {}

    async def build(
        self, body: bytes, version: ModelVersion, order: Order, now: datetime
    ) -> tuple[GenerationRequest, Reservation]:
        """The request and what to hold for it.

        Raises InvalidRequest, GenerationFailed, and Overloaded when it is worth another try.

        All lines of a batch run on `version`, whatever the name they use for it means today.
        """
        fields = _parse(body, order.endpoint)
        try:
            tokenizer = await self._tokenizer(version)
            check_early(fields, version, tokenizer.vocab_size)
            await self._check_grammar(fields, version)
            encoder = PromptEncoder(tokenizer, self._renderer, version.max_model_len)
            prompts = await _encode(encoder, fields, now)
        except TemplateBusy as error:
            raise Overloaded(str(error), retry_after_ms=RETRY_MS) from error
        except (ManifestError, TokenizerNotSupported, TemplateFailure) as error:
            log.error("%s cannot be used: %s", version.pinned_name, error)
            raise GenerationFailed(f"The text of {version.pinned_name} cannot be made.") from error
        request = build_request(fields, prompts, version, tokenizer.vocab_size, order)
        return request, reserve(fields, request, version, order)

    async def contents(
        self, body: bytes, version: ModelVersion, order: Order, now: datetime
    ) -> AnswerContents | None:
        """What the answer shows besides words, None for nothing; all as `build` was given it."""
        fields = _parse(body, order.endpoint)
        if fields.details == NO_DETAILS:
            return None
        tokenizer = await self._tokenizer(version)
        encoder = PromptEncoder(tokenizer, self._renderer, version.max_model_len)
        prompts = await _encode(encoder, fields, now)
        request = build_request(fields, prompts, version, tokenizer.vocab_size, order)
        return contents_of(fields, request, TokenReader(tokenizer, request.text))

    def close(self) -> None:
        """End the child processes of templates and grammars."""
        self._renderer.close()
        self._grammars.close()

    async def _check_grammar(
        self, fields: ChatRequest | CompletionRequest, version: ModelVersion
    ) -> None:
        constraint = fields.constraint
        if constraint is None:
            return
        folder = Path(version.weights_folder)
        try:
            await self._grammars.check(folder, constraint.grammar, constraint.param)
        except GrammarBusy as error:
            raise Overloaded(str(error), retry_after_ms=RETRY_MS) from error

    async def _tokenizer(self, version: ModelVersion) -> Tokenizer:
        known = self._tokenizers.get(version.weights_digest)
        if known is None:
            known = await asyncio.to_thread(_load, version)
            self._tokenizers[version.weights_digest] = known
        return known


def _load(version: ModelVersion) -> Tokenizer:
    folder = Path(version.weights_folder)
    if verify_text_files(folder) != version.weights_digest:
        raise ManifestError(f"{folder} holds other weights than those registered.")
    return Tokenizer.from_folder(folder)


async def _encode(
    encoder: PromptEncoder, fields: ChatRequest | CompletionRequest, now: datetime
) -> list[Sequence[int]]:
    if isinstance(fields, ChatRequest):
        messages = [ChatMessage(m.role, m.text, m.name) for m in fields.messages]
        return [await encoder.encode_chat(messages, now, fields.chat_options)]
    return [
        await encoder.encode_completion(prompt) if isinstance(prompt, str) else prompt
        for prompt in fields.prompts
    ]


def _parse(body: bytes, endpoint: str) -> ChatRequest | CompletionRequest:
    kind = ChatRequest if endpoint == CHAT_ENDPOINT else CompletionRequest
    fields = kind.parse(parse_object(body))
    if fields.stream:
        raise InvalidRequest("A batch's requests cannot be streamed.", param="stream")
    return fields
