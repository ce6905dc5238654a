"""Tokens as a request's caller sees them: one by one as bytes, and together as text."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.interface.text_options import TextOptions
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenReader:
    """One model's tokenizer under one request's options."""

    tokenizer: Tokenizer
    options: TextOptions

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, also of a part of a character; a control token's name."""
        return self.tokenizer.token_bytes(token_id)

    def answer(self) -> Detokenizer:
        """A reader of one choice's output."""
        at_start = not self.options.continues_prompt
        return self._detokenizer(at_start=at_start)

    def prompt(self) -> Detokenizer:
        """A reader of one prompt."""
        return self._detokenizer(at_start=True)

    def prompt_text(self, token_ids: Iterable[int]) -> str:
        """The text of a whole prompt."""
        detokenizer = self.prompt()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def _detokenizer(self, *, at_start: bool) -> Detokenizer:
        return Detokenizer(
            self.tokenizer, at_start=at_start, shows_special=self.options.shows_special
        )
