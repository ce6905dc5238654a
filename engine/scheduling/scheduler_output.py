"""What one step computes, as plain values: all that execution ever learns of the schedule."""

from dataclasses import dataclass

from engine.interface.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence's debt that this step pays.

    `token_ids` stand at positions start .. start + len(token_ids) - 1 and get their KV in the
    slots that `block_table` names (token i: block i // block_size). When `is_sampled`, these
    are the last tokens known, and the token after them is wanted.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    is_sampled: bool
    num_prompt_tokens: int
    sampling: SamplingParams

    @property
    def end(self) -> int:
        """Tokens with KV after this step; also the position of a token sampled by it."""
        return self.start + len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that precede the one sampled by this step."""
        return self.end - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work; sequences in any order, each at most once."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)
