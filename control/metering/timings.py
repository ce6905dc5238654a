"""Where a request's time went: one record for each, written with its settlement.

    accept   its first byte        -> queued        (text to tokens, the ledger, Redis)
    queue    queued                -> assigned
    place    assigned              -> taken up by its replica
    wait     taken up              -> first computed
    prefill  first computed        -> first token sampled
    publish  first token sampled   -> in the log and the feeds
    decode   first token sampled   -> last token sampled

The first six are the time to the first token as the service sees it; a stream's gateway adds when
it told the first words, `told`, counted from the request's first byte like the rest. A request that
went on elsewhere has no accept and no place: its queue is all that came before the attempt that
settled.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CancelProof:
    """How a cancellation went. `asked_at` is in seconds on the shared clock.

    `seen_s` is how long it took until the engine had stopped, which was at its step `step`,
    `num_steps` after it was told. `tokens_after` were sampled after the replica knew, and
    `blocks_freed` are KV blocks that came free. Of a request that no engine had, only when it was
    asked and how long it took are known.
    """

    asked_at: float
    seen_s: float | None = None
    step: int | None = None
    num_steps: int | None = None
    tokens_after: int = 0
    blocks_freed: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent in each stage; None for a stage that it did not reach.

    The inter-token times are over all choices; None if none said two tokens.
    """

    queue_s: float | None = None
    wait_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    accept_s: float | None = None
    place_s: float | None = None
    publish_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p95_s: float | None = None
    inter_token_max_s: float | None = None
    cancel: CancelProof | None = None


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The least value that so large a share does not exceed, of values in order; None of none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
