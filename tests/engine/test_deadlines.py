"""Who is overdue, and what ended sequences leave behind."""

from engine.scheduling.deadlines import Deadlines
from tests.engine.sequences import sequence


def test_the_overdue_are_taken_once_and_the_most_overdue_first() -> None:
    deadlines = Deadlines(lambda _: True)
    late, later, last = (sequence(order=order) for order in range(3))
    for deadline, whose in ((2.0, later), (1.0, late), (3.0, last)):
        deadlines.add(deadline, whose)

    assert deadlines.take_overdue(2.0) == [late, later]
    assert deadlines.take_overdue(2.0) == []


def test_who_has_ended_is_never_overdue() -> None:
    living, ended = sequence(order=0), sequence(order=1)
    deadlines = Deadlines(lambda other: other is living)
    deadlines.add(1.0, ended)
    deadlines.add(1.0, living)

    assert deadlines.take_overdue(5.0) == [living]


def test_what_ended_sequences_leave_behind_stays_bounded() -> None:
    living = sequence()
    deadlines = Deadlines(lambda other: other is living)
    deadlines.add(1.0, living)
    for number in range(1, 1000):
        deadlines.add(1.0, sequence(order=number))
        deadlines.sweep(num_living=1)

    assert len(deadlines) < 100
    assert deadlines.take_overdue(1.0) == [living]
