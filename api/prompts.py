"""Prompts to token ids, for every version that is served.

A version's text files are checked against its manifest before they are used, and must belong to
the registered weights. Loading and long texts stay off the event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from control.errors import GenerationFailed, Overloaded
from control.registry.manifest import ManifestError, verify_text_files
from control.registry.model_version import ModelVersion, Registry
from engine.interface.chat_options import ChatOptions
from engine.text.prompt_encoder import ChatMessage, PromptEncoder
from engine.text.template_process import TemplateBusy, TemplateFailure, TemplateRenderer
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerNotSupported

MAX_VERSIONS = 16
LONG_TEXT_BYTES = 64 * 1024
MAX_LONG_AT_ONCE = 2
BUSY_RETRY_MS = 1000

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True)
class VersionText:
    """How one version reads: its encoder, the number of ids it knows, and its tokenizer."""

    encoder: PromptEncoder
    vocab_size: int
    tokenizer: Tokenizer


class Prompts:
    """Encoders by version, the most recently used ones kept."""

    def __init__(self) -> None:
        self._renderer = TemplateRenderer()
        self._texts: OrderedDict[str, asyncio.Task[VersionText]] = OrderedDict()
        self._long = asyncio.Semaphore(MAX_LONG_AT_ONCE)

    def start(self) -> None:
        """Start the process that renders chat templates."""
        self._renderer.start()

    def close(self) -> None:
        """End it."""
        self._renderer.close()

    async def preload(self, registry: Registry) -> None:
        """Load the versions in force; one that cannot be loaded fails its own requests later."""
        for version in registry.by_name.values():
            if version.is_in_force:
                await asyncio.wait([self._loading(version)])

    async def of(self, version: ModelVersion) -> VersionText:
        """How the version reads. Raises GenerationFailed if its files cannot be trusted."""
        loading = self._loading(version)
        try:
            return await asyncio.shield(loading)
        except (ManifestError, TokenizerNotSupported, OSError) as error:
            self._texts.pop(version.pinned_name, None)
            raise GenerationFailed(
                f"The text files of {version.pinned_name} cannot be used."
            ) from error

    async def encode_chat(
        self, text: VersionText, messages: Sequence[ChatMessage], options: ChatOptions
    ) -> list[TokenIds]:
        """The one prompt of a conversation.

        Raises InvalidRequest, GenerationFailed, or Overloaded when too many templates wait.
        """
        num_bytes = sum(len(message.content.encode()) for message in messages)
        now = datetime.now(UTC)
        try:
            if num_bytes <= LONG_TEXT_BYTES:
                return [await text.encoder.encode_chat(messages, now, options)]
            async with self._long:
                # A loop of its own: between the awaits a long text means long work.
                work = text.encoder.encode_chat(messages, now, options)
                return [await asyncio.to_thread(asyncio.run, work)]
        except TemplateBusy as error:
            raise Overloaded(str(error), retry_after_ms=BUSY_RETRY_MS) from error
        except TemplateFailure as error:
            raise GenerationFailed("The model's chat template could not be rendered.") from error

    async def encode_completion(
        self, text: VersionText, prompts: Sequence[str] | Sequence[TokenIds]
    ) -> list[TokenIds]:
        """Each prompt's ids. Raises InvalidRequest."""
        encoded: list[TokenIds] = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                encoded.append(prompt)
            elif len(prompt) <= LONG_TEXT_BYTES:
                encoded.append(await text.encoder.encode_completion(prompt))
            else:
                async with self._long:
                    encoded.append(await text.encoder.encode_completion(prompt))
        return encoded

    def _loading(self, version: ModelVersion) -> asyncio.Task[VersionText]:
        name = version.pinned_name
        if name not in self._texts:
            self._texts[name] = asyncio.create_task(
                asyncio.to_thread(_load, version, self._renderer)
            )
            while len(self._texts) > MAX_VERSIONS:
                self._texts.popitem(last=False)
        self._texts.move_to_end(name)
        return self._texts[name]


def _load(version: ModelVersion, renderer: TemplateRenderer) -> VersionText:
    folder = Path(version.weights_folder)
    found = verify_text_files(folder)
    if found != version.weights_digest:
        raise ManifestError(f"{folder} holds other weights than {version.pinned_name}.")
    tokenizer = Tokenizer.from_folder(folder)
    encoder = PromptEncoder(tokenizer, renderer, version.max_model_len)
    return VersionText(encoder, tokenizer.vocab_size, tokenizer)
