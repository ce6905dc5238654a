"""The instants of one attempt, from its assignment to its last token, and what they come to.

Instants before the replica took the request up are on the shared clock, later ones on this
process's monotonic clock.
"""

from dataclasses import dataclass, field

from control.metering.timings import CancelProof, Timings, quantile
from control.streams.messages import Assignment
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate


@dataclass(frozen=True, slots=True)
class Received:
    """When a replica took a request up: on the shared clock, and on the monotonic one."""

    shared_at: float
    monotonic_at: float


@dataclass(slots=True)
class RequestTimes:
    """Notes what happens to one attempt; every method is called with a clock reading."""

    assignment: Assignment
    received: Received
    scheduled_at: float | None = None
    _first_token_at: float | None = None
    _last_token_at: float | None = None
    _published_at: float | None = None
    # By choice, when its last token came; and all times between two of a choice.
    _last_of: dict[int, float] = field(default_factory=dict)
    _gaps: list[float] = field(default_factory=list)
    # When it was asked, on the shared clock; when the replica knew, and the step it was at.
    _cancel: tuple[float, float, int] | None = None
    _stopped: tuple[float, int] | None = None
    _tokens_after: int = 0
    _blocks_freed: int = 0

    def note_update(self, update: SequenceUpdate, now: float) -> None:
        """Something of the request was computed, or ended."""
        if update.scheduled_at is not None:
            self.scheduled_at = min(self.scheduled_at or update.scheduled_at, update.scheduled_at)
        if update.token_ids:
            self._note_tokens(update, now)
        if update.end is SequenceEnd.CANCELLED:
            self._stopped = (now, update.step)
            self._blocks_freed += update.blocks_freed

    def note_published(self, now: float) -> None:
        """All that was sampled until now is in the log and the feeds."""
        self._published_at = self._published_at or now

    def note_cancel(self, asked_at: float | None, now: float, step: int) -> None:
        """It is to be stopped: since when that is asked, and how many steps were done by now.

        The first to say so may not know since when: then it was asked just before.
        """
        if asked_at is None:
            asked_at = self.received.shared_at + now - self.received.monotonic_at
        if self._cancel is None:
            self._cancel = (asked_at, now, step)
        else:
            _, known_at, known_step = self._cancel
            self._cancel = (min(asked_at, self._cancel[0]), known_at, known_step)

    def timings(self) -> Timings:
        """What the instants come to."""
        scheduled, first, last = self.scheduled_at, self._first_token_at, self._last_token_at
        accept_s, queue_s, place_s = self._before()
        gaps = sorted(self._gaps)
        return Timings(
            accept_s=accept_s,
            queue_s=queue_s,
            place_s=place_s,
            wait_s=_between(self.received.monotonic_at, scheduled),
            prefill_s=_between(scheduled, first),
            publish_s=_between(first, self._published_at),
            decode_s=_between(first, last),
            inter_token_p50_s=quantile(gaps, 0.5),
            inter_token_p95_s=quantile(gaps, 0.95),
            inter_token_max_s=gaps[-1] if gaps else None,
            cancel=self._cancel_proof(),
        )

    def _before(self) -> tuple[float | None, float, float | None]:
        """Accept, queue and place: one after another until the request was here."""
        arrival, order = self.assignment.request.arrival, self.assignment
        if order.queued_at is None or order.assigned_at is None or order.attempt > 1:
            return None, max(0.0, self.received.shared_at - arrival), None
        # Redis tells whole milliseconds, cut off.
        queued_at = max(arrival, order.queued_at)
        assigned_at = max(queued_at, order.assigned_at)
        place_s = max(0.0, self.received.shared_at - assigned_at)
        return queued_at - arrival, assigned_at - queued_at, place_s

    def _note_tokens(self, update: SequenceUpdate, now: float) -> None:
        self._first_token_at = self._first_token_at or now
        self._last_token_at = now
        before = self._last_of.get(update.choice)
        if before is not None:
            self._gaps.append(now - before)
        self._last_of[update.choice] = now
        if self._cancel is not None:
            self._tokens_after += len(update.token_ids)

    def _cancel_proof(self) -> CancelProof | None:
        if self._cancel is None:
            return None
        asked_at, known_at, known_step = self._cancel
        if self._stopped is None:
            return CancelProof(asked_at, tokens_after=self._tokens_after)
        stopped_at, step = self._stopped
        # The monotonic clock cannot tell how long the order was under way; the shared one can.
        received = self.received
        known_s = received.shared_at + known_at - received.monotonic_at - asked_at
        return CancelProof(
            asked_at=asked_at,
            seen_s=max(0.0, known_s) + stopped_at - known_at,
            step=step,
            num_steps=max(0, step - known_step),
            tokens_after=self._tokens_after,
            blocks_freed=self._blocks_freed,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
