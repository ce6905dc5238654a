"""The most blocks that running sequences will hold at once, if each ends where it is expected to.

Adding up what each comes to in the end counts blocks of sequences together that never live
together: whoever ends early gives its blocks back while the others still grow. All grow at one
pace, so the most is held at the moment before one of them ends.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Growth(NamedTuple):
    """What some sequences hold, in blocks, and how many more each is expected to need.

    `num_shared` is how much larger their tables are than what they hold together.
    """

    held: NDArray[np.int64]
    missing: NDArray[np.int64]
    num_shared: int

    @property
    def peak(self) -> int:
        """The most blocks that they will hold at once."""
        return projected_peak(self.held, self.missing) - self.num_shared

    def plus(self, held: int, final: int) -> "Growth":
        """The same with one more, which holds `held` and is expected to come to `final`."""
        missing = max(0, final - held)
        return Growth(np.append(self.held, held), np.append(self.missing, missing), self.num_shared)


def projected_peak(held: NDArray[np.int64], missing: NDArray[np.int64]) -> int:
    """Blocks held at the worst moment to come, the present one included; 0 for nobody.

    Sequence i holds `held[i]` blocks (those of its prompt count as held: it fills fast) and
    will need `missing[i]` more, one block per unit of time, and then leave. When it has got
    its last block, those that need no less are there with as many blocks more. After Gong et
    al., "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025).
    """
    order = np.argsort(-missing)
    still_missing = missing[order]
    num_there = np.arange(1, len(order) + 1)
    return int((np.cumsum(held[order]) + num_there * still_missing).max(initial=0))
