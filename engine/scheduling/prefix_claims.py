"""Blocks that some sequence is computing right now.

When many requests with one beginning arrive together, the first computes it and the others
wait for its blocks, instead of all computing the same. A claim holds for the step it is made
in and the next, so nobody waits long for somebody who stands still.
"""

from engine.scheduling.sequence import Sequence

# Fewer tokens than this behind the last full block are not worth a step's waiting.
MIN_TAIL_TOKENS = 4


class PrefixClaims:
    """Claims of this step and of the one before, by block key."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._before: dict[bytes, Sequence] = {}
        self._now: dict[bytes, Sequence] = {}

    def begin_step(self) -> None:
        """Let the claims lapse that were not made again in the last step."""
        self._before, self._now = self._now, {}

    def try_claim(self, sequence: Sequence, start: int, count: int) -> bool:
        """Claim the blocks of `count` tokens from position `start`.

        False, and nothing claimed, when somebody else is computing the first of them: it is
        cheaper to wait. Whoever is within a block goes on, since that block is its own.
        """
        keys = self._keys(sequence, start, count)
        if keys and start % self._block_size == 0:
            owner = self._now.get(keys[0]) or self._before.get(keys[0])
            if owner is not None and owner is not sequence:
                return False
        self._now.update(dict.fromkeys(keys, sequence))
        return True

    def _keys(self, sequence: Sequence, start: int, count: int) -> list[bytes]:
        size, prefix = self._block_size, sequence.prefix
        num_known = len(sequence.token_ids)
        end = min(start + count, num_known)
        last = min(-(-end // size), num_known // size)
        keys = [prefix.key(index) for index in range(start // size, last)]
        tail = num_known // size * size
        if end == num_known >= max(start, tail) + MIN_TAIL_TOKENS:
            keys.append(prefix.partial_key(tail // size, sequence.token_ids[tail:]))
        return keys
