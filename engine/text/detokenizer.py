"""Token ids to text while they arrive, exactly.

Tokens are bytes, and a character may span tokens, so bytes go through an incremental UTF-8
decoder: it holds back an unfinished character and nothing else. Bytes that can never become
a character turn into U+FFFD, one for each longest beginning of a character, as in any whole
decode. Text is therefore the same however the tokens were cut into steps.
"""

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice. Not shared between choices.

    Control tokens have no text, unless `shows_special`. `at_start` says that the text stands
    alone, as a chat answer does: the space that sentencepiece-style tokenizers put in front is
    then left out. Pass False for the continuation of a raw prompt, where that space belongs
    between the two.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, at_start: bool = True, shows_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._unseen = frozenset() if shows_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = at_start and tokenizer.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain once these tokens have come; often empty, never partial."""
        unseen = self._unseen
        pieces = [self._tokenizer.token_bytes(t) for t in token_ids if t not in unseen]
        return self._without_first_space(self._decoder.decode(b"".join(pieces)))

    def flush(self) -> str:
        """The rest, when no more tokens will come: U+FFFD if a character was left unfinished."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if not text or not self._drops_space:
            return text
        self._drops_space = False
        return text.removeprefix(" ")
