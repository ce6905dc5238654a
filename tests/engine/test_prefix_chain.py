from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface.prefix_keys import block_keys, child_key
from engine.kv_cache.prefix_chain import PrefixChain


@given(
    st.lists(st.integers(0, 100), max_size=30),
    st.lists(st.integers(0, 100), max_size=20),
    st.integers(1, 6),
)
def test_keys_are_those_that_everybody_else_computes_also_as_tokens_come(
    prompt: list[int], output: list[int], block_size: int
) -> None:
    token_ids = list(prompt)
    chain = PrefixChain("scope", token_ids, block_size)
    for token_id in output:
        token_ids.append(token_id)
    expected = block_keys("scope", prompt + output, block_size)
    assert [chain.key(index) for index in range(len(expected))] == expected
    assert [len(chain.tokens(index)) for index in range(len(expected))] == [block_size] * len(
        expected
    )


def test_each_key_is_computed_once() -> None:
    calls = []

    def counting_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
        calls.append(tuple(token_ids))
        return child_key(parent, token_ids)

    token_ids = [1, 2, 3, 4, 5]
    chain = PrefixChain("scope", token_ids, 2, counting_key)
    assert calls == [(1, 2), (3, 4)]
    for _ in range(3):
        chain.key(0)
        chain.key(1)
    token_ids += [6, 7]
    for _ in range(3):
        chain.key(2)
    assert calls == [(1, 2), (3, 4), (5, 6)]


def test_a_block_with_unknown_tokens_has_no_key() -> None:
    chain = PrefixChain("scope", [1, 2, 3], 2)
    with pytest.raises(AssertionError, match="unknown tokens"):
        chain.key(1)
    assert chain.tokens(1) == (3,)
    assert chain.tokens(2) == ()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_a_part_of_a_block_has_a_name_behind_the_blocks_before_it(
    token_ids: list[int], block_size: int
) -> None:
    chain = PrefixChain("scope", token_ids, block_size)
    index = (len(token_ids) - 1) // block_size
    tail = token_ids[index * block_size :]
    whole = PrefixChain("scope", token_ids[: index * block_size] + tail, len(tail))
    key = chain.partial_key(index, tail)
    if index == 0:
        assert key == whole.key(0)
    assert key != chain.partial_key(index, [*tail, 0])
    assert (key in block_keys("scope", token_ids, block_size)) == (len(tail) == block_size)
