"""Ids find their partition and cannot be guessed."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.identity.request_id import ALPHABET, LENGTH, created_at_of, mint_request_id


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**98 - 1))
def test_an_id_tells_its_second(second: int, random_bits: int) -> None:
    request_id = mint_request_id(second + 0.9, random_bits)
    assert len(request_id) == LENGTH
    assert set(request_id) <= set(ALPHABET)
    assert created_at_of(request_id) == datetime.fromtimestamp(second, UTC)


@given(st.tuples(st.integers(0, 2**98 - 1), st.integers(0, 2**98 - 1)))
def test_other_random_bits_give_another_id(bits: tuple[int, int]) -> None:
    first, second = (mint_request_id(1.0, b) for b in bits)
    assert (first == second) == (bits[0] == bits[1])


@pytest.mark.parametrize("text", ["", "short", "u" * 26, "0" * 27, "Z" * 26, "é" * 26])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a request id"):
        created_at_of(text)
