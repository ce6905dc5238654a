"""What an engine says of itself: how full it is, and what it has done since its start."""

from dataclasses import dataclass

from engine.scheduling.inter_token_controller import ControllerState


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine says of itself between two steps.

    The totals count from the engine's start: places lost by sequences, for whatever reason,
    prompt tokens taken from the prefix cache, blocks moved to the host and back, and results or
    cancels for sequences that had ended before.
    """

    kv_blocks_free: int
    kv_blocks_total: int
    host_blocks_free: int
    projected_free_tokens: int
    running: int
    waiting: int
    max_num_seqs: int
    steps_total: int
    preemptions_total: int
    cached_tokens_total: int
    offloaded_blocks_total: int
    loaded_blocks_total: int
    late_events_total: int
    stalls_total: int
    controller: ControllerState
