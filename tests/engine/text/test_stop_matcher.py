"""The matcher against an oracle that looks at whole text, one character at a time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_matcher import StopMatcher

stop_lists = st.lists(st.text(alphabet="ab\u4f60", min_size=1, max_size=5), max_size=4)
pieces_of_text = st.lists(st.text(alphabet="abc\u4f60", max_size=4))


def oracle(stop_strings: list[str], text: str) -> tuple[str, bool]:
    """What may be shown of a whole text, and whether a stop string ended it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def longest_possible_beginning(stop_strings: list[str], text: str) -> int:
    return max(
        (
            size
            for stop in stop_strings
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ),
        default=0,
    )


@given(stop_strings=stop_lists, pieces=pieces_of_text)
def test_any_split_shows_what_the_oracle_shows(stop_strings: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stop_strings)
    shown = "".join(matcher.push(piece)[0] for piece in pieces)
    assert (shown + matcher.flush(), matcher.matched) == oracle(stop_strings, "".join(pieces))


@given(stop_strings=stop_lists, pieces=pieces_of_text)
def test_only_what_could_become_a_stop_string_is_held_back(
    stop_strings: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stop_strings)
    shown, text = "", ""
    for piece in pieces:
        text += piece
        emitted, matched = matcher.push(piece)
        shown += emitted
        if matched:
            return
        held = longest_possible_beginning(stop_strings, text)
        assert shown == text[: len(text) - held]


def test_a_stop_string_may_span_pieces_and_is_never_shown() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("er: hi") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_a_beginning_that_comes_to_nothing_is_shown_in_full() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("try") == ("ENtry", False)
    assert matcher.push(" EN") == (" ", False)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_the_longest_of_those_complete_at_once_counts() -> None:
    assert StopMatcher(["b", "aab"]).push("xaab") == ("x", True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher([]).push("anything") == ("anything", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


def test_hostile_stop_strings_cost_linear_time() -> None:
    """A rescanning matcher needs 10^8 comparisons here; this one reads each character once."""
    matcher = StopMatcher(["a" * 1023 + "b"])
    started = time.process_time()
    for _ in range(100):
        matcher.push("a" * 1000)
    assert time.process_time() - started < 2.0
