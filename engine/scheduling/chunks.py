"""In which order, and with how much of the step, prompts are served."""

import numpy as np
from numpy.typing import NDArray

# Of so many parts of each step the oldest prompt is sure of one, whoever overtakes it.
OLDEST_PARTS = 4


def service_order(
    owed: NDArray[np.int64],
    rank: NDArray[np.int64],
    is_batch: NDArray[np.bool_],
    chunk_size: int,
    budget: int,
) -> list[tuple[int, int]]:
    """Whom to serve, first to last, as (index, most tokens); the caller stops at the budget.

    Interactive before batch. Within a class, prompts that one chunk completes go first, so
    that a short prompt does not wait for a long one; but the oldest of all gets a quarter of
    the step before anybody, so that it does not wait for ever either, and appears again later.
    `rank` orders by importance, class included, smallest first.
    """
    if not len(owed):
        return []
    in_order = np.lexsort((rank, owed > chunk_size, is_batch)).tolist()
    order = [(index, chunk_size) for index in in_order]
    if len(order) > 1:
        order.insert(0, (int(np.argmin(rank)), min(chunk_size, max(1, budget // OLDEST_PARTS))))
    return order
