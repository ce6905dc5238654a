"""Decides when there is room for one more sequence.

Watermarks keep admission from causing preemptions: a newcomer has to leave some blocks
unpromised, and once blocks ran out nobody joins until the projection has fallen well
below the pool. A sequence that has lost its place as often as it may joins only with a
guarantee for all that it can ever need.
"""

from collections.abc import Set
from typing import Protocol

from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.projected_peak import Growth
from engine.scheduling.sequence import Sequence

# No sequence loses its place more often than this, be it for want of blocks or to make way for a
# reader: whoever waits for its words cannot tell the one from the other.
MAX_PREEMPTIONS = 3


class Predictor(Protocol):
    """Foresees output lengths; see OutputLengthPredictor."""

    def expected_output(self, cache_scope: str, num_output_tokens: int, max_tokens: int) -> int:
        """How many output tokens there will have been in the end."""

    def observe(self, cache_scope: str, num_output_tokens: int, is_complete: bool) -> None:
        """An output has ended by itself, or was cut."""


class Admission:
    """Opens block tables for sequences that may join, and knows when they may not."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        predictor: Predictor,
        high_watermark: float,
        low_watermark: float,
    ) -> None:
        self._kv_cache = kv_cache
        self._predictor = predictor
        self._low = int(low_watermark * kv_cache.num_blocks)
        self._high = int(high_watermark * kv_cache.num_blocks)
        self.is_short = False

    def note_shortage(self) -> None:
        """Blocks have run out: nobody joins until there is some distance to that again."""
        self.is_short = True

    def note_projection(self, running: Growth) -> None:
        """A shortage is over when what runs is expected to keep well below the pool."""
        if self.is_short and running.peak <= self._low:
            self.is_short = False

    def may_join(self, sequence: Sequence, running: Growth, held: Set[int] | None = None) -> bool:
        """Whether the sequence may join those that are running.

        If some of those should be thought away, `held` are the blocks of the others.
        """
        kv_cache = self._kv_cache
        if must_be_guaranteed(sequence) and not kv_cache.can_guarantee(sequence.max_tokens):
            return False
        if not len(running.held):
            return True
        ceiling = self._low if self.is_short else self._high
        expected = self.expected_tokens(sequence)
        return kv_cache.has_room(sequence.prefix, expected, ceiling, running, held)

    def open(self, sequence: Sequence) -> BlockTable:
        """The block table of a sequence that joins."""
        return self._kv_cache.open(
            sequence.prefix,
            self.expected_tokens(sequence),
            is_guaranteed=must_be_guaranteed(sequence),
        )

    def project_again(self, sequence: Sequence, table: BlockTable) -> None:
        """Correct the projection of a sequence that has outgrown it."""
        if not table.is_guaranteed:
            self._kv_cache.project(table, self.expected_tokens(sequence))

    def expected_tokens(self, sequence: Sequence) -> int:
        """How many tokens the sequence is expected to come to, prompt included."""
        if must_be_guaranteed(sequence):
            return sequence.max_tokens
        spec = sequence.spec
        return spec.num_prompt_tokens + self._predictor.expected_output(
            sequence.prefix.cache_scope, sequence.num_output_tokens, spec.sampling.max_tokens
        )


def must_be_guaranteed(sequence: Sequence) -> bool:
    """Whether the sequence may not lose its place once more."""
    return sequence.num_preemptions >= MAX_PREEMPTIONS
