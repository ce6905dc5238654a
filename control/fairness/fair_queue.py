"""The requests of one model that wait, and which of them is next.

    class       interactive before batch, except for the floor and for urgency (class_order.py)
      tenant    within a class, the one with the least virtual time (virtual_time.py)
        request within a tenant, the one that arrived first

A request that is taken is charged what it is expected to use; what it did use is set right when
it is settled. One that comes back, because its replica died or handed it back, stands where it
stood: it was charged already, and its tenant is served by the virtual time that it had then.

Pure bookkeeping: no clock, no Redis. Taking one of 10,000 that wait, of 1,000 tenants, costs a
few microseconds (`headrace bench fairness`).
"""

from dataclasses import dataclass
from functools import partial

from control.fairness.class_order import ClassOrder
from control.fairness.least_heap import LeastHeap
from control.fairness.virtual_time import VirtualTime
from control.streams.messages import Charge, QueueEntry
from engine.interface.generation_request import PriorityClass


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits. `tag` is its tenant's virtual time when it was first taken, if ever."""

    entry: QueueEntry
    tag: float | None


class FairQueue:
    """Who waits, in which order.

    `virtual_time` is shared with whoever settles: after a charge from outside, call `recharged`.
    """

    def __init__(self, virtual_time: VirtualTime, class_order: ClassOrder) -> None:
        self._virtual_time = virtual_time
        self._class_order = class_order
        self._waiting: dict[str, _Waiting] = {}
        # What one tenant has waiting in one class, oldest first.
        self._lines: dict[tuple[PriorityClass, str], LeastHeap] = {}
        self._tenants = {
            priority_class: LeastHeap(partial(self._place, priority_class))
            for priority_class in PriorityClass
        }
        # Whoever comes back is lifted to the least of those who wait in any class.
        self._active = LeastHeap(virtual_time.of)
        self._last_active: str | None = None
        self._deadlines = LeastHeap(lambda request_id: self._waiting[request_id].entry.deadline_at)

    def __len__(self) -> int:
        return len(self._waiting)

    def num_waiting(self, priority_class: PriorityClass, tenant_id: str) -> int:
        """How many requests of the tenant wait in the class."""
        return len(self._lines.get((priority_class, tenant_id), ()))

    def add(self, entry: QueueEntry, tag: float | None = None) -> None:
        """Let a request wait. One that waits already keeps its place.

        `tag` is its charge's `time_before` for one that was taken and comes back.
        """
        if entry.request_id in self._waiting:
            return
        if entry.tenant_id not in self._active:
            least = self._active.least() or self._last_active
            if least is not None:
                self._virtual_time.lift(entry.tenant_id, self._virtual_time.of(least))
            self._active.push(entry.tenant_id)
        self._waiting[entry.request_id] = _Waiting(entry, tag)
        line = self._lines.get((entry.priority_class, entry.tenant_id))
        if line is None:
            line = LeastHeap(lambda request_id: self._waiting[request_id].entry.arrival)
            self._lines[entry.priority_class, entry.tenant_id] = line
        line.push(entry.request_id)
        self._tenants[entry.priority_class].push(entry.tenant_id)
        self._deadlines.push(entry.request_id)

    def head(self, now: float) -> QueueEntry | None:
        """The request to be served next, or None. `now` tells what is urgent."""
        heads = {
            priority_class: self._first(priority_class, tenant_id).entry
            for priority_class, tenants in self._tenants.items()
            if (tenant_id := tenants.least()) is not None
        }
        return heads[self._class_order.choose(heads, now)] if heads else None

    def charge_for(self, request_id: str, service: float) -> Charge:
        """What taking the request costs its tenant, if it is expected to need this `service`."""
        entry = self._waiting[request_id].entry
        before = self._virtual_time.of(entry.tenant_id)
        after = before + service / entry.weight
        return Charge(entry.tenant_id, entry.weight, service, before, after)

    def take(self, request_id: str, charge: Charge) -> None:
        """The request is served: it waits no more, and its tenant is charged.

        One that was charged before, as its tag tells, is not charged again.
        """
        waiting = self._waiting[request_id]
        if waiting.tag is None:
            self._virtual_time.charge(charge.tenant_id, charge.service, charge.weight)
            is_contested = all(len(tenants) for tenants in self._tenants.values())
            priority_class = waiting.entry.priority_class
            self._class_order.note(priority_class, charge.service, is_contested=is_contested)
        self.discard(request_id)

    def recharged(self, tenant_id: str) -> None:
        """The tenant's virtual time has changed, or its first request."""
        for tenants in (*self._tenants.values(), self._active):
            if tenant_id in tenants:
                tenants.push(tenant_id)

    def discard(self, request_id: str) -> None:
        """Forget a request; harmless if it does not wait."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._deadlines.discard(request_id)
        priority_class, tenant_id = waiting.entry.priority_class, waiting.entry.tenant_id
        line = self._lines[priority_class, tenant_id]
        line.discard(request_id)
        if not len(line):
            del self._lines[priority_class, tenant_id]
            self._tenants[priority_class].discard(tenant_id)
            if not any(tenant_id in tenants for tenants in self._tenants.values()):
                self._active.discard(tenant_id)
                self._last_active = tenant_id
        # Another request may be first now, and with it the tenant's place changes.
        self.recharged(tenant_id)

    def expired(self, now: float) -> list[QueueEntry]:
        """Requests whose deadline has passed; they wait no more."""
        expired = []
        while (request_id := self._deadlines.least()) is not None:
            entry = self._waiting[request_id].entry
            if entry.deadline_at > now:
                break
            expired.append(entry)
            self.discard(request_id)
        return expired

    def check(self) -> None:
        """Every waiting request is in its tenant's line, and every line's tenant can be found."""
        lines: dict[tuple[PriorityClass, str], set[str]] = {}
        for request_id, waiting in self._waiting.items():
            entry = waiting.entry
            lines.setdefault((entry.priority_class, entry.tenant_id), set()).add(request_id)
        assert lines.keys() == self._lines.keys()
        for key, line in self._lines.items():
            line.check(lines[key])
        for priority_class, tenants in self._tenants.items():
            tenants.check({tenant_id for c, tenant_id in lines if c is priority_class})
        self._active.check({tenant_id for _, tenant_id in lines})
        self._deadlines.check(self._waiting.keys())

    def _first(self, priority_class: PriorityClass, tenant_id: str) -> _Waiting:
        """The oldest request of a tenant that has some waiting in the class."""
        request_id = self._lines[priority_class, tenant_id].least()
        assert request_id is not None, f"the line of {tenant_id} is empty"
        return self._waiting[request_id]

    def _place(self, priority_class: PriorityClass, tenant_id: str) -> float:
        """By what a tenant stands in a class: its virtual time, or its first one's tag."""
        tag, present = self._first(priority_class, tenant_id).tag, self._virtual_time.of(tenant_id)
        return present if tag is None else min(tag, present)
