"""Prompts of real text for measurements on real weights: pieces of the engine's own source.

It is text that comes with the program, and every piece of it is unlike the others.
"""

from pathlib import Path

import engine.interface
from engine.text.tokenizer import Tokenizer


def text_tokens(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The first tokens of all the text there is, from its beginning again where it ends."""
    source = Path(engine.interface.__path__[0]).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py")))
    tokens = list(tokenizer.encode_plain(text))
    return (tokens * (1 + num_tokens // len(tokens)))[:num_tokens]


def pieces(tokens: list[int], lengths: list[int]) -> list[tuple[int, ...]]:
    """One prompt after another out of the text, of these lengths."""
    prompts, start = [], 0
    for length in lengths:
        prompts.append(tuple(tokens[start : start + length]))
        start += length
    return prompts
