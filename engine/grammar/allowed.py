"""What a grammar says about the next token of an output."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Allowed(NamedTuple):
    """What may come next: a bit for each text token, lowest first, and whether the end may.

    `words` has one uint32 for every 32 tokens of the vocabulary. One of the two allows something.
    """

    words: NDArray[np.uint32]
    may_end: bool

    @property
    def must_end(self) -> bool:
        """Whether the output is complete and nothing can be added to it."""
        return not self.words.any()
