"""Says how likely a token must be to be drawn: top_k, then top_p, then min_p.

    top_k   the k likeliest tokens
    top_p   of these, renormalised, the fewest likeliest that together make up p
    min_p   of these, those at least m times as likely as the likeliest

Each is a threshold, so what is kept is all that reaches the highest of the three. Tokens as
likely as the last one kept are kept too: order among equals decides nothing. No operation
mixes rows, and how far a row is sorted depends on that row alone.
"""

import torch
from torch import Tensor

# Nucleus and top-k almost always end within so many likeliest tokens; where they do not, the
# next width is tried, and at last the whole vocabulary is sorted.
_WIDTHS = (64, 1024)


def least_probability(probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest probability kept, [rows], of float32 probabilities [rows, vocab].

    `top_k` is int64 in 1 .. vocab, which keeps all; a `top_p` of 1 or more keeps all.
    """
    least = probabilities.amax(dim=-1) * min_p
    vocab_size = probabilities.shape[-1]
    rows = ((top_k < vocab_size) | (top_p < 1)).nonzero().flatten()
    for width in (*_WIDTHS, vocab_size):
        if not len(rows):
            break
        cut = probabilities[rows]
        if width < vocab_size:
            ordered = cut.topk(width, dim=-1).values
        else:
            ordered = cut.sort(dim=-1, descending=True).values
        kept, is_final = _least_kept(ordered, top_k[rows], top_p[rows], vocab_size)
        done = rows[is_final]
        least[done] = torch.maximum(least[done], kept[is_final])
        rows = rows[~is_final]
    return least


def _least_kept(
    ordered: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """What top_k, then top_p keep of probabilities [rows, width] in falling order.

    Returns the smallest kept value per row, and whether looking beyond `width` could not
    change it.
    """
    width = ordered.shape[-1]
    has_top_k = top_k < vocab_size
    kth = ordered.gather(-1, (top_k.clamp(max=width) - 1)[:, None])
    is_kept = ordered >= kth
    mass = torch.where(is_kept, ordered, 0.0).cumsum(dim=-1)
    # After top_k the rest is renormalised; without it the whole row sums to 1.
    total = torch.where(has_top_k, mass[:, -1], 1.0)
    before = mass - ordered
    is_kept &= (before < (top_p * total)[:, None]) | (top_p >= 1)[:, None]
    least = torch.where(is_kept, ordered, 1.0).amin(dim=-1)
    # With a top_k, more tokens behind the last one could be its equals, or change the total.
    # Where that token's probability is 0 it does not matter: so are all others'.
    is_nil = kth[:, 0] == 0
    is_complete = ~has_top_k | (ordered[:, -1] < kth[:, 0]) | is_nil
    is_final = is_complete & (~is_kept[:, -1] | is_nil) | (width == vocab_size)
    return least, is_final
