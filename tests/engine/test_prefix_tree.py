import pytest

from engine.interface.prefix_keys import child_key
from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.prefix_tree import PrefixTree


def grow(tree: PrefixTree, parent: CachedBlock, *token_ids: int, block: int = 0) -> CachedBlock:
    node = tree.insert(parent, child_key(parent.key, token_ids), token_ids, block)
    assert node is not None
    return node


def test_a_block_is_found_under_its_parent_and_nowhere_else() -> None:
    tree = PrefixTree()
    first = grow(tree, tree.root("a"), 1, 2)
    second = grow(tree, first, 1, 2)
    tree.check()
    assert tree.find(tree.root("a"), first.key, (1, 2)) is first
    assert tree.find(first, second.key, (1, 2)) is second
    assert tree.find(tree.root("a"), second.key, (1, 2)) is None
    assert tree.find(tree.root("b"), first.key, (1, 2)) is None
    assert set(tree) == {first, second}


def test_a_key_alone_is_not_believed() -> None:
    tree = PrefixTree()
    first = grow(tree, tree.root("a"), 1, 2)
    assert tree.find(tree.root("a"), first.key, (1, 3)) is None


def test_a_name_that_is_taken_is_given_to_nobody_else() -> None:
    tree = PrefixTree()
    first = grow(tree, tree.root("a"), 1, 2)
    assert tree.insert(tree.root("a"), first.key, (3, 4), 1) is None
    assert tree.insert(tree.root("b"), first.key, (1, 2), 1) is None
    tree.check()
    assert set(tree) == {first}


def test_the_newest_of_the_similar_ones_is_named() -> None:
    tree = PrefixTree()
    root = tree.root("a")
    assert tree.find_similar(root, (1, 9)) is None
    older = grow(tree, root, 1, 2)
    root = tree.root("a")
    newer = grow(tree, root, 1, 3)
    other = grow(tree, root, 2, 2)
    assert tree.find_similar(root, (1, 9)) is newer
    assert tree.find_similar(root, (2, 9)) is other
    tree.remove(older)
    assert tree.find_similar(root, (1, 9)) is newer
    tree.remove(newer)
    assert tree.find_similar(root, (1, 9)) is None
    tree.check()


def test_a_scope_is_forgotten_with_its_last_block() -> None:
    tree = PrefixTree()
    before = tree.root("a")
    assert tree.root("a") is not before
    node = grow(tree, before, 1, 2)
    assert tree.root("a") is before
    tree.remove(node)
    assert tree.root("a") is not before
    assert not list(tree)
    tree.check()


def test_a_block_with_continuations_is_not_forgotten_before_them() -> None:
    tree = PrefixTree()
    first = grow(tree, tree.root("a"), 1, 2)
    second = grow(tree, first, 3, 4)
    with pytest.raises(AssertionError, match="continuations"):
        tree.remove(first)
    tree.remove(second)
    tree.remove(first)
    with pytest.raises(AssertionError, match="root"):
        tree.remove(tree.root("a"))


def test_common_beginnings_are_counted_in_tokens() -> None:
    node = CachedBlock(b"key", (1, 2, 3), "a", None)
    assert node.num_common_tokens((1, 2, 3, 4)) == 3
    assert node.num_common_tokens((1, 2)) == 2
    assert node.num_common_tokens((1, 9, 3)) == 1
    assert node.num_common_tokens((9,)) == 0
