"""Divides a step's prefill tokens among the prompts that want them."""

from typing import NamedTuple

# The part of each step that the oldest prompt is sure of, however many short ones overtake it.
OLDEST_SHARE = 4


class Prefill(NamedTuple):
    """A sequence that owes more than one token; `rank` orders them, smallest first."""

    slot: int
    owed: int
    rank: int
    is_interactive: bool


def divide(prefills: list[Prefill], budget: int, chunk_size: int) -> dict[int, int]:
    """Tokens for each slot that gets any, adding up to at most `budget`.

    Interactive before batch. Within a class, prompts that one chunk completes go first, so
    that a short prompt does not wait for a long one; but the oldest prompt of all gets a
    quarter of the step before anybody, so that it does not wait for ever either.
    """
    in_order = sorted(prefills, key=lambda p: (not p.is_interactive, p.owed > chunk_size, p.rank))
    counts: dict[int, int] = {}
    if len(prefills) > 1:
        oldest = min(prefills, key=lambda p: p.rank)
        counts[oldest.slot] = min(oldest.owed, chunk_size, max(1, budget // OLDEST_SHARE))
        budget -= counts[oldest.slot]
    for prefill in in_order:
        if budget <= 0:
            break
        granted = counts.get(prefill.slot, 0)
        more = min(min(prefill.owed, chunk_size) - granted, budget)
        if more > 0:
            counts[prefill.slot] = granted + more
            budget -= more
    return counts
