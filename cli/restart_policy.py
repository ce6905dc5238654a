"""How long a child that keeps dying waits before its next start.

Each failure in a row doubles the wait, up to a cap; a run that lasted long enough
forgives the failures before it. Values in, values out: the supervisor owns the clock.
"""

from dataclasses import dataclass

_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with a cap; all times in seconds."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_after_s: float = 60.0

    def failures_after(self, failures: int, ran_for_s: float) -> int:
        """The failures in a row, counting the one that has just ended a run of `ran_for_s`."""
        return 1 if ran_for_s >= self.stable_after_s else failures + 1

    def delay_s(self, failures: int) -> float:
        """The wait before the next start, after `failures` (one or more) failures in a row."""
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        return min(self.max_delay_s, self.first_delay_s * 2.0**doublings)
