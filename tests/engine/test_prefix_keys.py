from hypothesis import given
from hypothesis import strategies as st

from engine.interface.prefix_keys import KEY_BYTES, block_keys, child_key, root_key

TOKENS = st.lists(st.integers(0, 200_000), max_size=40)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_prompts_share_as_many_keys_as_they_share_full_blocks(
    ours: list[int], theirs: list[int], block_size: int
) -> None:
    mine = block_keys("scope", ours, block_size)
    others = block_keys("scope", theirs, block_size)
    for index, (key, other) in enumerate(zip(mine, others, strict=False)):
        end = (index + 1) * block_size
        assert (key == other) == (ours[:end] == theirs[:end])


@given(TOKENS, st.integers(1, 8))
def test_only_full_blocks_have_keys_and_each_its_own(token_ids: list[int], block_size: int) -> None:
    keys = block_keys("scope", token_ids, block_size)
    assert len(keys) == len(set(keys)) == len(token_ids) // block_size
    assert all(len(key) == KEY_BYTES for key in keys)
    assert keys == block_keys("scope", [*token_ids, 7], block_size)[: len(keys)]


@given(TOKENS, st.integers(1, 8))
def test_scopes_share_no_key(token_ids: list[int], block_size: int) -> None:
    ours = block_keys("a", token_ids, block_size)
    assert not set(ours) & set(block_keys("b", token_ids, block_size))
    assert root_key("a") not in ours


def test_the_same_tokens_behind_another_beginning_have_another_key() -> None:
    assert child_key(root_key("a"), [1, 2]) != child_key(child_key(root_key("a"), [3]), [1, 2])
    first, second = block_keys("a", [1, 2, 1, 2], 2)
    assert first != second


def test_keys_never_change_because_others_compute_them_too() -> None:
    assert root_key("tenant").hex() == "077acdcb2992ef3b9fb7d5488e480779"
    child = child_key(root_key("tenant"), [1, 2, 200_000])
    assert child.hex() == "f3ec1a8bc79ffaa03b3685a2836f188c"
