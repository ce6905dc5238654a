"""Keeps users' text and a template's control tokens apart while both are one string.

A template puts users' text and control-token strings side by side. Before it runs, every
control-token string inside users' text is broken by a marker, one private character that
occurs nowhere in the conversation; so every whole control-token string in the rendered prompt
is the template's own. After it ran, the prompt is cut at those strings and the markers are
taken out of the text between. The model sees the very text that the user wrote.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from engine.text.tokenizer_files import AddedToken

_PRIVATE_USE = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))

_Trie = dict[str, "_Trie"]
_END = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: text, and the control token after it, if any."""

    text: str
    token: AddedToken | None


class ControlTokens:
    """The control tokens of one model, as strings to break up or to split at."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        texts = list(self._by_text)
        # A trie matches the longest token at the leftmost place in one pass over the text.
        self._whole = re.compile(_trie_pattern(texts)) if texts else None
        self._start = re.compile(f"(?=({_trie_pattern(texts)}))") if texts else None
        self._prefixes = frozenset(t[:end] for t in texts for end in range(1, len(t)))
        self._suffixes = frozenset(t[start:] for t in texts for start in range(1, len(t)))
        self._max_length = max(map(len, texts), default=0)

    def break_up(self, text: str, marker: str) -> str:
        """The text with markers so that no token stands in it or can form across its ends.

        Undone by removing every marker. `marker` is one character that the text lacks.
        """
        if self._start is None or not text:
            return text
        cuts = [match.start() + 1 for match in self._start.finditer(text)]
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return self._with_closed_ends(marker.join(pieces), text, marker)

    def split(self, prompt: str, marker: str) -> Iterator[Segment]:
        """Cut a rendered prompt at its control tokens; texts come without markers."""
        place = 0
        eats_right = False
        for match in self._whole.finditer(prompt) if self._whole is not None else ():
            token = self._by_text[match[0]]
            text = prompt[place : match.start()].replace(marker, "")
            text = text.lstrip() if eats_right else text
            yield Segment(text.rstrip() if token.eats_left else text, token)
            place, eats_right = match.end(), token.eats_right
        rest = prompt[place:].replace(marker, "")
        yield Segment(rest.lstrip() if eats_right else rest, None)

    def _with_closed_ends(self, broken: str, text: str, marker: str) -> str:
        """Add a marker at an end that the text's neighbour could complete to a token."""
        reach = range(1, min(len(text), self._max_length) + 1)
        opens = any(text[:length] in self._suffixes for length in reach)
        closes = any(text[-length:] in self._prefixes for length in reach)
        # A text inside a token has neighbours on both sides; one marker is enough.
        is_inside = len(text) < self._max_length and any(text in token for token in self._by_text)
        front = marker if opens or is_inside else ""
        return front + broken + (marker if closes else "")


def unused_marker(texts: Iterable[str]) -> str | None:
    """A private-use character that occurs in none of the texts; None if all of them do."""
    joined = "".join(texts)
    candidates = map(chr, chain.from_iterable(range(*bounds) for bounds in _PRIVATE_USE))
    # Nearly always the first will do, and a search is far cheaper than a set of characters.
    first = next(candidates)
    if first not in joined:
        return first
    used = set(joined)
    return next((candidate for candidate in candidates if candidate not in used), None)


def _trie_pattern(texts: Iterable[str]) -> str:
    """A pattern for any of the texts, longest first, that tries each character once."""
    root: _Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _pattern_of(root)


def _pattern_of(node: _Trie) -> str:
    branches = [re.escape(c) + _pattern_of(following) for c, following in node.items() if c]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if _END in node else "")
