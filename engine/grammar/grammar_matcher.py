"""Follows one output through its grammar, token by token.

Everything it knows comes from the grammar and the output's tokens, so it can be built again
wherever those are. It runs in a process of its own (`matcher_child.py`): llguidance bounds its
steps only roughly, and a hostile grammar can cost it seconds or gigabytes.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from engine.grammar.allowed import Allowed
from engine.grammar.llguidance_source import GrammarRefused, llguidance_source
from engine.grammar.vocabulary import Vocabulary
from engine.interface.grammar import Grammar

_MAX_REASON_CHARS = 500
_DEAD_END = "no text of this model's tokens can complete the output."

# Well above what real schemas need, and for one token a few dozen milliseconds at the most.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


class GrammarMatcher:
    """The state of one output. After an exception it is of no further use.

    Nothing is shared between two of them, so what one does cannot show in another.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        """Compile the grammar; takes from under a millisecond to seconds. Raises GrammarRefused."""
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(
            vocabulary.tokens, llguidance_source(grammar), log_level=0, limits=_LIMITS
        )
        self._check()
        warnings = self._matcher.get_grammar_warnings()
        if warnings:
            raise GrammarRefused(_in_words(warnings[0]))

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. Raises GrammarRefused if the grammar does not allow them."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self._check()
            raise GrammarRefused("a token is not one that the grammar allows.")

    def allowed(self) -> Allowed:
        """What may come next. Raises GrammarRefused if nothing may, or it is too hard to say."""
        matcher = self._matcher
        may_end = matcher.is_accepting()
        is_text = self._vocabulary.is_text
        # Some bits more than tokens come.
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(is_text)] & is_text
        if matcher.is_error() or not (may_end or words.any()):
            self._check()
            raise GrammarRefused(_DEAD_END)
        return Allowed(words, may_end)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarRefused(_in_words(self._matcher.get_error()))


def _in_words(reason: str) -> str:
    if reason.startswith("NoExtension"):
        return _DEAD_END
    lines = [line.strip() for line in reason.splitlines() if not line.startswith("<")]
    return " ".join(lines)[:_MAX_REASON_CHARS]
