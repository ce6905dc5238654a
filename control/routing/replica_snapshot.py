"""What a replica last said of itself, and the placement it allows."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica at one instant. Capacities are in tokens and sequences, never in requests.

    `kv_tokens_free` is what all joined and waiting sequences are expected to leave of the pool.
    `last_order` is the inbox entry up to which this snapshot counts: whatever was assigned
    after it must be subtracted by the reader.

    What follows `last_order` is absent from the snapshots of older replicas. Most is for operators:
    a step's measured time is held under `inter_token_target_ms` by shrinking and growing
    `prefill_tokens`, the prompt tokens that the last step was given; `inter_token_ms` is 0.0 as
    long as nothing was measured. `is_stalled` replicas accept nothing until they move again.

    `expected_outputs` says, by cache scope, how many tokens the engine expects of an output
    without a limit, for the scopes that have asked last; `expected_output` says it for all others.
    None: nothing is expected, so every output counts as long as it may become.

    `num_sequences_yielding` sequences are of batch class and make way for interactive ones, which
    leaves `kv_tokens_yielding` tokens more to those.
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
    cached_tokens_total: int = 0
    inter_token_target_ms: float = 0.0
    inter_token_ms: float = 0.0
    prefill_tokens: int = 0
    expected_output: int | None = None
    expected_outputs: Mapping[str, int] = field(default_factory=dict)
    kv_tokens_yielding: int = 0
    num_sequences_yielding: int = 0

    @property
    def num_sequences_free(self) -> int:
        """How many more sequences may join."""
        return max(0, self.num_sequences_max - self.num_running - self.num_waiting)

    @property
    def num_interactive_free(self) -> int:
        """How many more interactive sequences may join if batch class makes way."""
        num_fixed = self.num_running + self.num_waiting - self.num_sequences_yielding
        return max(0, self.num_sequences_max - num_fixed)
