"""What parts of a step take, by the prices that the fitted model has for them now."""

from engine.scheduling.step_time_model import Prices


def decodes_seconds(decodes: int, context: float, prices: Prices) -> float:
    """What decodes that read so much context together add to a step."""
    return decodes * (prices.row + prices.token) + context * prices.context


def chunk_seconds(tokens: int, context: float, prices: Prices) -> float:
    """What a chunk behind so much context adds to a step of decodes; 0 if it has no tokens."""
    if tokens == 0:
        return 0.0
    per_token = prices.token + prices.context + prices.pair * (context + tokens / 2)
    return chunk_overhead_seconds(context, prices) + tokens * per_token


def chunk_overhead_seconds(context: float, prices: Prices) -> float:
    """What a chunk adds before its first token: less than nothing where decodes hide behind it."""
    return prices.chunk_base - prices.base + prices.row + prices.context * context
