from engine.kv_cache.cached_block import CachedBlock
from engine.kv_cache.host_tier import HostTier


def node(*, is_preempted: bool = False, scope: str = "a") -> CachedBlock:
    return CachedBlock(b"", (1,), scope, None, is_preempted=is_preempted)


def test_each_node_has_a_place_of_its_own_until_it_leaves() -> None:
    host = HostTier(3)
    nodes = [node(), node(is_preempted=True), node(scope="b")]
    assert {host.place(one) for one in nodes} == {0, 1, 2}
    assert host.num_free == 0
    assert set(host) == set(nodes)
    host.check()
    for one in nodes:
        host.take_out(one)
        host.leave(one)
        assert one.host_block is None
        host.check()
    assert host.num_free == 3


def test_only_idle_nodes_may_be_displaced_and_the_oldest_first() -> None:
    host = HostTier(4)
    needed, older, newer = node(is_preempted=True), node(), node()
    for one in (needed, older, newer):
        host.place(one)
    for loser in (older, newer):
        assert host.next_to_go() is loser
        host.take_out(loser)
        host.leave(loser)
    assert host.next_to_go() is None
    assert list(host) == [needed]


def test_the_scope_with_the_most_idle_nodes_is_displaced() -> None:
    host = HostTier(4)
    quiet = node(scope="quiet")
    loud = [node(scope="loud") for _ in range(3)]
    for one in (quiet, *loud):
        host.place(one)
    assert host.next_to_go() is loud[0]


def test_what_is_taken_out_is_in_nobodys_reach_until_it_is_put_back() -> None:
    host = HostTier(2)
    for one in (node(), node(is_preempted=True)):
        place = host.place(one)
        host.take_out(one)
        assert one not in set(host)
        assert host.next_to_go() is None
        assert one.host_block == place
        host.put_back(one)
        host.check()
        host.take_out(one)
        host.leave(one)


def test_a_host_without_memory_has_no_room() -> None:
    host = HostTier(0)
    assert host.num_free == 0
    assert host.next_to_go() is None
    host.check()
