"""A sequence's tokens as an array, for those few whose next token depends on them as such."""

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.scheduler_output import PENDING


class TokenHistory:
    """Mirrors `token_ids`, a list that its owner only appends to; each token is copied in once."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._mirror = np.empty(0, np.int64)
        self._num_mirrored = 0

    def tokens(self, *, is_pending: bool) -> NDArray[np.int64]:
        """All tokens known, and PENDING behind them if one more is being sampled. A new array."""
        start, end = self._num_mirrored, len(self._token_ids)
        if end >= len(self._mirror):
            wider = np.full(2 * end + 1, PENDING)
            wider[:start] = self._mirror[:start]
            self._mirror = wider
        self._mirror[start:end] = self._token_ids[start:]
        self._num_mirrored = end
        # What lies behind the known tokens was never written.
        return self._mirror[: end + is_pending].copy()
