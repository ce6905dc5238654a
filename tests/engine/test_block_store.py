"""What happens to KV when its block is needed; who asks is `test_kv_cache_manager`."""

from engine.interface.prefix_keys import child_key, root_key
from engine.kv_cache.block_store import BlockStore
from engine.kv_cache.swap_cost import MIN_MEASUREMENTS, REFUSALS_BEFORE_PROBE

BLOCK_SIZE = 16
SECONDS_PER_TOKEN = 1e-4


def fill_with_idle_blocks(store: BlockStore, num_blocks: int, turn: int) -> None:
    """Let so many blocks of different texts have been computed and left."""
    parent = store.tree.root("a")
    for number, block in enumerate(store.take(num_blocks)):
        tokens = (turn, *(number,) * (BLOCK_SIZE - 1))
        node = store.tree.insert(parent, child_key(root_key("a"), tokens), tokens, block)
        assert node is not None
        store.release([block], [node], is_preempted=False)


def test_a_dear_offload_that_is_only_tried_is_tried_with_few_of_a_steps_blocks() -> None:
    num_blocks = 64
    store = BlockStore(num_blocks, num_host_blocks=1024)
    store.recompute_s_per_token = SECONDS_PER_TOKEN
    # Moving a block takes twice as long as computing it.
    for _ in range(MIN_MEASUREMENTS):
        store.swap_cost.observe_moves(1, 2 * BLOCK_SIZE * SECONDS_PER_TOKEN)
    num_steps = 20 * REFUSALS_BEFORE_PROBE
    for turn in range(num_steps):
        fill_with_idle_blocks(store, num_blocks, turn)
        store.take_moves()
    # Each step decides once; a hundredth of what that costs may go into probes.
    assert 1 <= store.num_offloaded <= num_steps / 50
    store.check([])
