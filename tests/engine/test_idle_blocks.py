from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.idle_blocks import IdleBlocks


def node(scope: str = "a") -> CachedBlock:
    return CachedBlock(b"", (1,), scope, None)


def drain(idle: IdleBlocks) -> list[CachedBlock]:
    gone = []
    while (loser := idle.next_to_go()) is not None:
        assert idle.next_to_go() is loser, "asking takes nothing away"
        idle.remove(loser)
        gone.append(loser)
    return gone


def test_the_least_recently_used_goes_first() -> None:
    idle = IdleBlocks()
    nodes = [node() for _ in range(4)]
    idle.add("a", nodes[:2])
    idle.add("a", nodes[2:])
    idle.remove(nodes[0])
    idle.add("a", [nodes[0]])
    assert len(idle) == 4
    assert drain(idle) == [*nodes[1:], nodes[0]]
    assert len(idle) == 0


def test_the_largest_scope_gives_one_up() -> None:
    idle = IdleBlocks()
    quiet = [node("quiet") for _ in range(2)]
    loud = [node("loud") for _ in range(5)]
    idle.add("quiet", quiet)
    idle.add("loud", loud)
    gone = drain(idle)
    assert gone[:3] == loud[:3]
    assert set(gone[3:]) == {*quiet, *loud[3:]}


def test_nothing_to_add_is_no_scope() -> None:
    idle = IdleBlocks()
    idle.add("a", [])
    assert idle.next_to_go() is None
    assert list(idle) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 3)), max_size=60))
def test_in_any_order_a_scope_loses_only_while_none_is_larger(
    events: list[tuple[str, int]],
) -> None:
    idle = IdleBlocks()
    by_scope: dict[str, list[CachedBlock]] = {"a": [], "b": [], "c": []}
    for scope, count in events:
        if count > 0:
            new = [node(scope) for _ in range(count)]
            idle.add(scope, new)
            by_scope[scope] += new
        elif count < 0 and by_scope[scope]:
            # Somebody wants the newest again.
            idle.remove(by_scope[scope].pop())
        loser = idle.next_to_go()
        sizes = {name: len(nodes) for name, nodes in by_scope.items()}
        assert len(idle) == sum(sizes.values())
        assert set(idle) == {one for nodes in by_scope.values() for one in nodes}
        if loser is None:
            assert not len(idle)
        else:
            assert sizes[loser.cache_scope] == max(sizes.values())
            assert loser is by_scope[loser.cache_scope][0]
            if count == 0:
                idle.remove(by_scope[loser.cache_scope].pop(0))


def test_a_long_life_leaves_no_heap_behind() -> None:
    idle = IdleBlocks()
    kept = node("kept")
    idle.add("kept", [kept])
    for i in range(5_000):
        one = node(f"scope-{i % 7}")
        idle.add(one.cache_scope, [one])
        idle.remove(one)
    assert len(idle._largest) < 200
    assert drain(idle) == [kept]
