"""What came out of one step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowResult:
    """One scheduled sequence's outcome.

    `token_id` is the token sampled, None where none was asked for. `error` says why this
    sequence cannot go on; the others of the step are not touched by it.
    """

    token_id: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """One result per scheduled sequence, in the order of the SchedulerOutput."""

    rows: tuple[RowResult, ...]
