"""Attention over a KV cache that lies in blocks.

One layer's cache is [2 x kv_heads, num_blocks x block_size, head_dim]: keys of every head,
then values of every head. A block of one head is then one contiguous run, so that collecting
a sequence's context copies whole blocks, and the collected context is ready for a batched
product without another copy. Slot = block x block_size + offset.

Query heads g x kv_head .. share a key head in groups (GQA); a group's queries are treated as
rows of one small matrix, so keys and values are never repeated.

Places beyond a sequence's context are masked, not skipped: whatever stale numbers lie there
must be finite, which is the promise of whoever writes the cache. A soft cap, where a model has
one, squeezes scores into (-cap, cap) before the mask: cap x tanh(score / cap).
"""

import torch
from torch import Tensor
from torch.nn import functional

# Runs up to this long are attended as one small matrix per head, which on CPUs is several times
# faster than tiles; beyond it the scores no longer stay in the cache.
SHORT_RUN = 24


def write_kv(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Put kv [tokens, 2 x kv_heads, head_dim] into the given slots [tokens]."""
    cache.index_copy_(1, slots, kv.transpose(0, 1))


def gather_rows(block_tables: Tensor, num_kv_heads: int, num_blocks: int) -> Tensor:
    """Rows to collect, in the order [2, sequences, kv_heads, blocks]; the same for all layers.

    Seen as [2 x kv_heads x num_blocks, block_size x head_dim], the cache keeps block b of
    head h in row h x num_blocks + b.
    """
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1) * num_blocks
    return (heads + block_tables[None, :, None, :]).reshape(-1)


def gather_kv(cache: Tensor, rows: Tensor, block_size: int) -> Tensor:
    """Collect context: [2, sequences x kv_heads, context, head_dim], flattened in front."""
    head_dim = cache.shape[-1]
    return cache.view(-1, block_size * head_dim).index_select(0, rows).view(-1, head_dim)


def attend_decode(
    query: Tensor, context: Tensor, bias: Tensor, scale: float, soft_cap: float | None = None
) -> Tensor:
    """One query token per sequence against its padded context.

    query [sequences, heads, head_dim]; context as gather_kv gives it; bias
    [sequences x kv_heads, 1, length] is 0 where a sequence looks and -inf elsewhere.
    Returns [sequences, heads, head_dim].
    """
    sequences, heads, head_dim = query.shape
    keys, values = context.view(2, bias.shape[0], bias.shape[2], head_dim)
    groups = query.reshape(bias.shape[0], -1, head_dim)
    if soft_cap is None:
        scores = torch.baddbmm(bias, groups, keys.transpose(1, 2), alpha=scale)
    else:
        scores = _capped(torch.bmm(groups, keys.transpose(1, 2)) * scale, soft_cap) + bias
    return torch.bmm(scores.softmax(dim=-1), values).view(sequences, heads, head_dim)


def attend_chunk(
    query: Tensor,
    context: Tensor,
    visible: Tensor,
    num_uneven: int,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """A run of one sequence's tokens, each against what `visible` lets it see.

    query [tokens, heads, head_dim]; context [2, kv_heads, >= length, head_dim], already
    containing the run's own keys; visible [tokens, length] says which query sees which place,
    and all see all but the last `num_uneven` places. Returns [tokens, heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    keys, values = context[:, :, : visible.shape[1]]
    kv_heads = keys.shape[0]
    grouped = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, tokens, head_dim)
    if soft_cap is None and tokens <= SHORT_RUN:
        rows = grouped.reshape(kv_heads, -1, head_dim)
        # Keys on the left: they may lie apart from head to head, which the right side is slow at.
        scores = torch.bmm(keys, (rows * scale).transpose(1, 2)).transpose(1, 2).contiguous()
        hidden = ~visible[:, visible.shape[1] - num_uneven :]
        scores.view(*grouped.shape[:3], -1)[..., visible.shape[1] - num_uneven :].masked_fill_(
            hidden, float("-inf")
        )
        out = torch.bmm(scores.softmax(dim=-1), values).view(grouped.shape)
    elif soft_cap is None:
        out = functional.scaled_dot_product_attention(
            grouped,
            keys.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1),
            values.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1),
            attn_mask=visible,
            scale=scale,
        )
    else:
        scores = _capped(grouped @ keys.unsqueeze(1).transpose(2, 3) * scale, soft_cap)
        out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values.unsqueeze(1)
    return out.flatten(0, 1).transpose(0, 1)


def causal_mask(start: int, count: int, window: int | None = None) -> Tensor:
    """Which of the places 0 .. start + count - 1 the positions from `start` on may see.

    With a window, a position sees itself and the window - 1 before it.
    """
    mask = torch.ones(count, start + count, dtype=torch.bool).tril(start)
    return mask if window is None else mask.triu(start - window + 1)


def _capped(scores: Tensor, soft_cap: float) -> Tensor:
    return torch.tanh(scores / soft_cap) * soft_cap
