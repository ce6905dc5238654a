"""A model's tokens as llguidance wants them: bytes, and which are control tokens."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.grammar.llguidance_source import GrammarRefused
from engine.text.tokenizer import Tokenizer

# In front of a token's name: these bytes are never text.
_CONTROL_MARK = b"\xff"


class Vocabulary:
    """The tokens of one model; immutable.

    `is_text` has a word of 32 bits for every 32 tokens, as masks do, and a 1 for each that
    stands for text. Raises GrammarRefused for a model without an end token: there is no way to
    say that an output is complete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_token_ids:
            raise GrammarRefused("this model has no end token, so no output could be complete.")
        self.size = tokenizer.vocab_size
        self.eos_token_ids = tokenizer.eos_token_ids
        control_ids = tokenizer.special_ids | tokenizer.eos_token_ids
        self.is_text = _bits(set(range(self.size)) - control_ids, self.size)
        self.tokens = LLTokenizer(
            TokenizerWrapper(_TokenizerForm(tokenizer, control_ids)),
            n_vocab=self.size,
            eos_token=sorted(tokenizer.eos_token_ids),
        )


class _TokenizerForm:
    """The attributes by which llguidance knows a tokenizer.

    Called with text that the grammar leaves no way around, it says into which tokens the model
    would cut it, so that words are not spelled letter by letter.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, control_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.special_token_ids = sorted(control_ids)
        self.tokens = [
            (_CONTROL_MARK if token_id in control_ids else b"") + tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.vocab_size)
        ]
        texts = {self.tokens[i]: i for i in reversed(range(len(self.tokens)))}
        self._ids = {text: i for text, i in texts.items() if text and i not in control_ids}
        self._longest = max(map(len, self._ids))

    def __call__(self, raw: bytes) -> list[int]:
        token_ids = self._tokenizer.encode_plain(raw.decode(errors="replace"), at_start=False)
        # A tokenizer may add a space in front, or not know some bytes.
        if b"".join(map(self._tokenizer.token_bytes, token_ids)) == raw:
            return list(token_ids)
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        token_ids = []
        start = 0
        while start < len(raw):
            for end in range(min(len(raw), start + self._longest), start, -1):
                token_id = self._ids.get(raw[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                break
        return token_ids


def _bits(token_ids: Sequence[int] | set[int], size: int) -> NDArray[np.uint32]:
    bits = np.zeros((size + 31) // 32 * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
