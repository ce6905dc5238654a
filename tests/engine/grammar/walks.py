"""Outputs of a model without a thought: any token that its grammar allows."""

from random import Random

import numpy as np

from engine.grammar.allowed import Allowed
from engine.grammar.grammar_matcher import GrammarMatcher
from engine.grammar.vocabulary import Vocabulary
from engine.interface.grammar import Grammar
from engine.text.tokenizer import Tokenizer

MAX_TOKENS = 200


def ids_of(allowed: Allowed) -> list[int]:
    bits = np.unpackbits(allowed.words.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def random_output(vocabulary: Vocabulary, grammar: Grammar, random: Random) -> list[int] | None:
    """Tokens up to where the output ended; None when it never did."""
    matcher = GrammarMatcher(vocabulary, grammar)
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        allowed = matcher.allowed()
        if allowed.must_end or (allowed.may_end and random.random() < 0.5):
            return token_ids
        token_ids.append(random.choice(ids_of(allowed)))
        matcher.accept(token_ids[-1:])
    return None


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text, which must be whole characters."""
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()
