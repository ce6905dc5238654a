"""How much one step and the engine as a whole take on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold whatever the machine's speed and the cache's state.

    `chunk_size` bounds the tokens of one sequence in one step, `max_num_batched_tokens` those
    of all sequences together, `max_num_seqs` how many run, `max_waiting` how many may wait.
    """

    max_num_batched_tokens: int
    chunk_size: int
    max_num_seqs: int
    max_waiting: int

    def __post_init__(self) -> None:
        for name in ("chunk_size", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running sequence one token."
            )
