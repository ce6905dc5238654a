from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.sequences import sequence


def test_first_come_first_served() -> None:
    queue = WaitingQueue()
    assert queue.head is None
    sequences = [sequence(order=order) for order in range(3)]
    for one in sequences:
        queue.add(one)
    assert list(queue) == sequences
    assert queue.head is sequences[0]
    assert len(queue) == 3


def test_those_who_lost_their_place_stand_in_front_in_the_order_in_which_they_came() -> None:
    queue = WaitingQueue()
    first, second, third, new = (sequence(order=order) for order in range(4))
    queue.add(new)
    for one in (third, first, second):
        queue.put_back(one)
    assert list(queue) == [first, second, third, new]
    assert queue.head is first


@given(st.lists(st.integers(0, 3), max_size=60))
def test_in_any_order_of_events_the_oldest_is_the_head(events: list[int]) -> None:
    queue = WaitingQueue()
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for order, event in enumerate(events):
        if event == 0:
            new = sequence(order=order)
            queue.add(new)
            waiting.append(new)
        elif event == 1 and waiting:
            head = queue.head
            assert head is not None
            queue.remove(head)
            waiting.remove(head)
            running.append(head)
        elif event == 2 and running:
            back = running.pop(order % len(running))
            queue.put_back(back)
            waiting.append(back)
        elif event == 3 and waiting:
            gone = waiting.pop(order % len(waiting))
            queue.remove(gone)
        waiting.sort(key=lambda one: one.order)
        assert list(queue) == waiting
        assert queue.head is (waiting[0] if waiting else None)
        assert len(queue) == len(waiting)
