"""Whether the three counts agree: what was produced, what was delivered, and what was wasted.

Produced is what the engines' step logs say, wasted what was booked with a reason, delivered what
the ledger bills. An attempt goes on where the delivered tokens before it ended, so what it
delivered itself is where the next one went on, or the ledger ends, less where it began. Then of
each attempt

    produced = delivered + wasted

to the token. Everything here is values in and values out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from control.metering.settlement import Waste, WasteReason
from control.metering.step_log import Produced


@dataclass(frozen=True, slots=True)
class AttemptBalance:
    """One attempt whose counts do not agree."""

    produced: Produced
    delivered: int
    wasted: int

    @property
    def difference(self) -> int:
        """Tokens that were produced and neither delivered nor wasted; less than 0: too many."""
        return self.produced.num_tokens - self.delivered - self.wasted


@dataclass(slots=True)
class Balance:
    """All counts of the requests that have ended, and what does not agree.

    `still_open` requests have no ending yet and are not part of it. `untold` requests were billed
    tokens of which no step log tells: their logs are elsewhere, or have been dropped.
    """

    num_requests: int = 0
    produced: int = 0
    delivered: int = 0
    billed: int = 0
    wasted: dict[WasteReason, int] = field(default_factory=dict)
    off: list[AttemptBalance] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    still_open: list[str] = field(default_factory=list)

    @property
    def num_open(self) -> int:
        """How many requests have no ending yet."""
        return len(self.still_open)

    @property
    def is_even(self) -> bool:
        """Every attempt agrees, and the ledger bills what was delivered."""
        return not self.off and self.delivered == self.billed


def balance(
    produced: Iterable[Produced], billed: Mapping[str, int], waste: Iterable[Waste]
) -> Balance:
    """Compare the counts of every request of which a step log tells from its first attempt on.

    `billed` has the output tokens that the ledger bills for each request that has ended.
    """
    attempts: dict[str, list[Produced]] = {}
    for attempt in produced:
        attempts.setdefault(attempt.request_id, []).append(attempt)
    booked: dict[tuple[str, int], list[Waste]] = {}
    for row in waste:
        booked.setdefault((row.request_id, row.attempt), []).append(row)
    found = Balance()
    for request_id, of_request in attempts.items():
        num_billed = billed.get(request_id)
        if num_billed is None:
            found.still_open.append(request_id)
            continue
        of_request.sort(key=lambda attempt: attempt.attempt)
        if of_request[0].offset > 0:
            # An earlier attempt's log is not here: what it delivered cannot be checked.
            found.untold.append(request_id)
            continue
        _add(found, of_request, num_billed, booked)
    found.untold += [
        request_id
        for request_id, num_billed in billed.items()
        if num_billed and request_id not in attempts
    ]
    return found


def _add(
    found: Balance,
    attempts: Sequence[Produced],
    num_billed: int,
    booked: Mapping[tuple[str, int], Sequence[Waste]],
) -> None:
    ends = [later.offset for _, later in pairwise(attempts)] + [num_billed]
    found.num_requests += 1
    found.billed += num_billed
    for attempt, end in zip(attempts, ends, strict=True):
        rows = booked.get((attempt.request_id, attempt.attempt), ())
        for row in rows:
            found.wasted[row.reason] = found.wasted.get(row.reason, 0) + row.num_tokens
        wasted = sum(row.num_tokens for row in rows)
        delivered = end - attempt.offset
        found.produced += attempt.num_tokens
        found.delivered += delivered
        if attempt.num_tokens != delivered + wasted:
            found.off.append(AttemptBalance(attempt, delivered, wasted))


def waste_of_the_dead(found: Balance) -> list[Waste]:
    """What was produced and nobody has booked, as if every replica were dead: lost with it."""
    return [
        Waste(
            off.produced.request_id,
            off.produced.attempt,
            WasteReason.REPLICA_LOST,
            off.produced.replica_id,
            off.difference,
        )
        for off in found.off
        if off.difference > 0
    ]
