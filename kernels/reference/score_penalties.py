"""Makes tokens that were said before less likely, or more.

    repetition   s > 0: s / r      s <= 0: s * r      for tokens of prompt and output
    frequency    s - f * count     presence   s - p   for tokens of the output

One row at a time: who asks for this is in the minority, and histories differ in length.
"""

import torch
from torch import Tensor


def penalise_repetition(scores: Tensor, history: Tensor, penalty: float) -> None:
    """Change scores [vocab] in place; `history` int64 [n] may name a token many times."""
    said = scores[history]
    # Equal tokens have equal scores, so it does not matter which write is the last.
    scores[history] = torch.where(said > 0, said / penalty, said * penalty)


def penalise_presence(scores: Tensor, output: Tensor, presence: float, frequency: float) -> None:
    """Change scores [vocab] in place; `output` int64 [n] holds a token as often as it was said."""
    token_ids, counts = torch.unique(output, return_counts=True)
    scores[token_ids] -= counts * frequency + presence
