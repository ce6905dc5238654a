"""Who is next: between classes, between tenants, and within a tenant."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from control.fairness.class_order import ClassOrder
from control.fairness.fair_queue import FairQueue
from control.fairness.virtual_time import Rates, VirtualTime
from control.streams.messages import QueueEntry
from engine.interface.generation_request import PriorityClass

INTERACTIVE, BATCH = PriorityClass.INTERACTIVE, PriorityClass.BATCH
STRICT = {"batch_floor": 0.0, "urgent_s": 0.0}


def entry(
    request_id: str,
    tenant_id: str,
    priority_class: PriorityClass = INTERACTIVE,
    arrival: float = 0.0,
    deadline_at: float = 1e9,
    weight: float = 1.0,
) -> QueueEntry:
    return QueueEntry(
        request_id, tenant_id, priority_class, "digest", 1, 100, arrival, deadline_at, weight=weight
    )


def fair_queue(**order: float) -> tuple[FairQueue, VirtualTime]:
    virtual_time = VirtualTime()
    return FairQueue(virtual_time, ClassOrder(**(STRICT | order))), virtual_time


def served(queue: FairQueue, service: float = 1.0, now: float = 0.0) -> str:
    head = queue.head(now)
    assert head is not None
    take(queue, head.request_id, service)
    queue.check()
    return head.request_id


def take(queue: FairQueue, request_id: str, service: float) -> float:
    """Serve it; returns its tag."""
    charge = queue.charge_for(request_id, service)
    queue.take(request_id, charge)
    return charge.time_before


def test_tenants_take_turns_however_many_requests_one_of_them_has() -> None:
    queue, _ = fair_queue()
    for number in range(100):
        queue.add(entry(f"a{number:02}", "a", arrival=number))
    queue.add(entry("b0", "b", arrival=200.0))
    queue.add(entry("b1", "b", arrival=201.0))
    assert [served(queue) for _ in range(5)] == ["a00", "b0", "a01", "b1", "a02"]


def test_within_a_tenant_the_first_to_arrive_is_the_first_to_be_served() -> None:
    queue, _ = fair_queue()
    for name, arrival in (("late", 2.0), ("early", 1.0)):
        queue.add(entry(name, "a", arrival=arrival))
    assert [served(queue), served(queue)] == ["early", "late"]
    assert queue.head(0.0) is None


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    queue, _ = fair_queue()
    for number in range(300):
        queue.add(entry(f"a{number:03}", "a", arrival=number, weight=2.0))
        queue.add(entry(f"b{number:03}", "b", arrival=number))
    counted = Counter(served(queue, service=10.0)[0] for _ in range(300))
    assert abs(counted["a"] - 2 * counted["b"]) <= 3


def test_who_comes_back_has_saved_nothing_up() -> None:
    queue, virtual_time = fair_queue()
    for number in range(50):
        queue.add(entry(f"a{number:02}", "a", arrival=number))
    for _ in range(20):
        served(queue, service=100.0)
    queue.add(entry("b0", "b", arrival=99.0))
    assert virtual_time.of("b") == virtual_time.of("a") == 2000.0


def test_who_comes_to_an_empty_queue_starts_where_the_last_one_left() -> None:
    queue, virtual_time = fair_queue()
    queue.add(entry("a0", "a"))
    served(queue, service=70.0)
    queue.add(entry("b0", "b"))
    assert virtual_time.of("b") == 70.0


def test_interactive_comes_before_batch_and_both_cost_the_tenant_the_same() -> None:
    queue, _ = fair_queue()
    queue.add(entry("batch of a", "a", BATCH, arrival=0.0))
    queue.add(entry("talk of a", "a", arrival=1.0))
    queue.add(entry("talk of b", "b", arrival=2.0))
    queue.add(entry("batch of b", "b", BATCH, arrival=3.0))
    served(queue)
    served(queue, service=5.0)
    # b has used more in the interactive class, so a's batch goes first.
    assert [served(queue), served(queue)] == ["batch of a", "batch of b"]


def test_batch_keeps_its_floor_while_both_wait() -> None:
    queue, _ = fair_queue(batch_floor=0.1)
    for number in range(500):
        queue.add(entry(f"i{number:03}", "a", arrival=number))
        queue.add(entry(f"b{number:03}", "b", BATCH, arrival=number))
    counted = Counter(served(queue, service=20.0)[0] for _ in range(400))
    assert counted["b"] == 40


def test_what_batch_was_owed_is_forgotten_when_nobody_else_waits() -> None:
    queue, _ = fair_queue(batch_floor=0.1)
    for number in range(3):
        queue.add(entry(f"i{number}", "a", arrival=number))
    for _ in range(3):
        served(queue, service=1000.0)
    queue.add(entry("i3", "a", arrival=4.0))
    queue.add(entry("b0", "b", BATCH, arrival=3.0))
    assert served(queue) == "i3"


def test_a_batch_request_whose_window_closes_stands_by_its_arrival() -> None:
    queue, _ = fair_queue(urgent_s=60.0)
    queue.add(entry("b0", "a", BATCH, arrival=1.0, deadline_at=1000.0))
    queue.add(entry("i0", "b", arrival=2.0))
    queue.add(entry("i1", "b", arrival=3.0))
    assert served(queue, now=500.0) == "i0"
    assert served(queue, now=941.0) == "b0"


def test_what_was_charged_too_much_is_given_back() -> None:
    queue, virtual_time = fair_queue()
    for number in range(3):
        queue.add(entry(f"a{number}", "a", arrival=number))
        queue.add(entry(f"b{number}", "b", arrival=number))
    assert served(queue, service=1000.0) == "a0"
    virtual_time.charge("a", -999.0)
    queue.recharged("a")
    assert served(queue, service=10.0) == "b0"
    assert served(queue, service=10.0) == "a1"


def test_one_that_comes_back_stands_where_it_stood_and_is_not_charged_again() -> None:
    queue, virtual_time = fair_queue()
    for number in range(4):
        queue.add(entry(f"a{number}", "a", arrival=number))
        queue.add(entry(f"b{number}", "b", arrival=number))
    first = entry("a0", "a", arrival=0.0)
    tag = take(queue, "a0", 100.0)
    assert served(queue, service=50.0) == "b0"
    queue.add(first, tag)
    assert served(queue, service=100.0) == "a0"
    assert virtual_time.of("a") == 100.0


def test_expired_requests_wait_no_more() -> None:
    queue, _ = fair_queue()
    for name, deadline_at in (("soon", 5.0), ("later", 50.0), ("now", 1.0)):
        queue.add(entry(name, "a", deadline_at=deadline_at))
    assert [found.request_id for found in queue.expired(5.0)] == ["now", "soon"]
    queue.check()
    assert served(queue) == "later"


def test_who_spent_its_share_in_batches_gains_nothing_by_moving_to_conversations() -> None:
    queue, virtual_time = fair_queue()
    queue.add(entry("a batch", "a", BATCH))
    queue.add(entry("b batch", "b", BATCH, arrival=1.0))
    assert served(queue, service=100.0) == "a batch"
    for number in range(12):
        queue.add(entry(f"b{number:02}", "b", arrival=number))
        queue.add(entry(f"a{number:02}", "a", arrival=number))
    first = [served(queue, service=10.0)[0] for _ in range(10)]
    assert first == ["b"] * 10
    assert virtual_time.of("b") == virtual_time.of("a")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 40), st.integers(1, 40)),
        min_size=10,
        max_size=150,
    ),
    st.integers(1, 4),
)
def test_service_received_differs_by_no_more_than_the_bound(
    requests: list[tuple[int, int, int]], num_places: int
) -> None:
    rates = Rates()
    queue, virtual_time = fair_queue()
    received = dict.fromkeys("ab", 0.0)
    running: list[tuple[str, float, float]] = []
    bound = 2 * max(rates.charge(50, 0), num_places * rates.charge(0, 40)) + rates.charge(50, 40)
    for number, (prompt, output, guess) in enumerate(requests):
        for tenant_id in "ab":
            name = f"{tenant_id}{number:04}"
            queue.add(entry(name, tenant_id, arrival=number))
        head = queue.head(0.0)
        assert head is not None
        estimate, actual = rates.charge(prompt, guess), rates.charge(prompt, output)
        take(queue, head.request_id, estimate)
        running.append((head.tenant_id, estimate, actual))
        if len(running) > num_places:
            tenant_id, estimated, used = running.pop(0)
            virtual_time.charge(tenant_id, used - estimated)
            queue.recharged(tenant_id)
            received[tenant_id] += used
        assert abs(received["a"] - received["b"]) <= bound


class QueueMachine(RuleBasedStateMachine):
    """Any order of arrivals, service, withdrawals, corrections and returns keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.virtual_time = VirtualTime()
        self.queue = FairQueue(self.virtual_time, ClassOrder())
        self.now = 0.0
        self.number = 0
        self.taken: list[tuple[QueueEntry, float]] = []

    @rule(
        tenant=st.sampled_from("abcd"),
        priority_class=st.sampled_from(list(PriorityClass)),
        life=st.floats(0.0, 20.0),
    )
    def arrive(self, tenant: str, priority_class: PriorityClass, life: float) -> None:
        self.number += 1
        name = f"r{self.number:05}"
        self.queue.add(entry(name, tenant, priority_class, self.now, self.now + life))

    @precondition(lambda self: len(self.queue) > 0)
    @rule(service=st.floats(0.0, 1000.0))
    def serve(self, service: float) -> None:
        head = self.queue.head(self.now)
        assert head is not None
        self.taken.append((head, take(self.queue, head.request_id, service)))

    @precondition(lambda self: self.taken)
    @rule(correction=st.floats(-100.0, 100.0))
    def settle(self, correction: float) -> None:
        served_entry, _ = self.taken[-1]
        self.virtual_time.charge(served_entry.tenant_id, correction)
        self.queue.recharged(served_entry.tenant_id)

    @precondition(lambda self: self.taken)
    @rule()
    def come_back(self) -> None:
        self.queue.add(*self.taken.pop())

    @rule(number=st.integers(1, 30))
    def withdraw(self, number: int) -> None:
        self.queue.discard(f"r{number:05}")

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for expired in self.queue.expired(self.now):
            assert expired.deadline_at <= self.now

    @invariant()
    def books_agree(self) -> None:
        self.queue.check()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
