"""How much one step and the engine as a whole take on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold whatever the machine's speed and the cache's state.

    `chunk_size` bounds the tokens of one sequence in one step, `max_num_batched_tokens` those
    of all sequences together, `max_num_seqs` how many run, `max_waiting` how many may wait.
    The watermarks are the parts of the pool that projections may fill: the high one as a rule,
    the low one until a shortage of blocks is over. Both at 1.0, every projection that is too
    small costs somebody a place, which is good for measurements only.
    """

    max_num_batched_tokens: int
    chunk_size: int
    max_num_seqs: int
    max_waiting: int
    high_watermark: float = 0.95
    low_watermark: float = 0.90

    def __post_init__(self) -> None:
        for name in ("chunk_size", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if not 0.0 < self.low_watermark <= self.high_watermark <= 1.0:
            raise ValueError(
                f"The watermarks ({self.low_watermark} and {self.high_watermark}) must be parts of "
                "one, the low one at most the high one."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running sequence one token."
            )
