"""Finds the caller's stop strings in text that arrives in pieces.

An Aho-Corasick automaton reads each character once. Its depth is the length of the longest
suffix of the text that could still grow into a stop string; exactly that much is held back.
The first stop string to be complete ends the text; of those complete at the same character
the longest counts, so that no part of it is shown.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string. `fallback` is its longest proper suffix that is one too.

    `match_length` is the length of the longest stop string that ends here, 0 if none does.
    """

    depth: int
    next: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    match_length: int = 0


class StopMatcher:
    """Watches the text of one choice. `matched` stays True once a stop string was complete.

    With `shows_match` the stop string itself is shown, and nothing behind it.
    """

    def __init__(self, stop_strings: Sequence[str], *, shows_match: bool = False) -> None:
        if not all(stop_strings):
            raise ValueError("A stop string holds at least one character.")
        self._root = _automaton(stop_strings)
        self._node = self._root
        self._held = ""
        self._shows_match = shows_match
        self.matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string has been completed.

        After a match nothing more is shown, whatever is pushed.
        """
        if self.matched:
            return "", True
        if not self._root.next:
            return text, False
        known = self._held + text
        node = self._node
        for end, character in enumerate(text, start=len(self._held) + 1):
            node = self._step(node, character)
            if node.match_length:
                self.matched = True
                self._held = ""
                return known[: end if self._shows_match else end - node.match_length], True
        self._node = node
        shown = len(known) - node.depth
        self._held = known[shown:]
        return known[:shown], False

    def flush(self) -> str:
        """The text held back, when no more will come: it did not become a stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _step(self, node: _Node, character: str) -> _Node:
        current: _Node | None = node
        while current is not None:
            following = current.next.get(character)
            if following is not None:
                return following
            current = current.fallback
        return self._root


def _automaton(stop_strings: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stop_strings:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(depth=node.depth + 1))
        node.match_length = len(stop)
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Set the fallbacks breadth first: a node's fallback is always shallower than itself."""
    waiting = deque([root])
    while waiting:
        parent = waiting.popleft()
        for character, node in parent.next.items():
            candidate = parent.fallback
            while candidate is not None and character not in candidate.next:
                candidate = candidate.fallback
            node.fallback = candidate.next[character] if candidate is not None else root
            node.match_length = node.match_length or node.fallback.match_length
            waiting.append(node)
