"""What a replica last said of itself, and the placement it allows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica at one instant. Capacities are in tokens and sequences, never in requests.

    `kv_tokens_free` is what the projections of all joined and waiting sequences leave of the
    pool. `last_order` is the inbox entry up to which this snapshot counts: whatever was assigned
    after it must be subtracted by the reader.

    What follows `last_order` is for operators, and absent from the snapshots of older replicas.
    A step's measured time is held under `inter_token_target_ms` by shrinking and growing
    `prefill_budget`, the prompt tokens that one step may compute; `inter_token_ms` is 0.0 as long
    as nothing was measured. `is_stalled` replicas accept nothing until they move again.
    """

    replica_id: str
    model: str
    version: str
    weights_digest: str
    is_accepting: bool
    kv_tokens_total: int
    kv_tokens_free: int
    kv_blocks_total: int
    kv_blocks_free: int
    num_sequences_max: int
    num_running: int
    num_waiting: int
    steps_total: int
    tokens_total: int
    last_order: str = "0-0"
    is_stalled: bool = False
    stalls_total: int = 0
    preemptions_total: int = 0
    prefix_hit_tokens_total: int = 0
    inter_token_target_ms: float = 0.0
    inter_token_ms: float = 0.0
    prefill_budget: int = 0

    @property
    def num_sequences_free(self) -> int:
        """How many more sequences may join."""
        return max(0, self.num_sequences_max - self.num_running - self.num_waiting)
