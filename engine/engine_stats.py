"""What an engine says of itself: how full it is, and what it has done since its start."""

from dataclasses import dataclass

from engine.scheduling.inter_token_controller import ControllerState


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine says of itself between two steps.

    The totals count from the engine's start: places lost by sequences, for whatever reason,
    prompt tokens taken from the prefix cache, blocks moved to the host and back, and results or
    cancels for sequences that had ended before. Of the running sequences `running_interactive`
    are read by somebody; `running_yielding` are of batch class and would make way for more of
    those, which would raise `projected_free_tokens` by `yielding_tokens` at least.
    """

    kv_blocks_free: int
    kv_blocks_total: int
    host_blocks_free: int
    projected_free_tokens: int
    running: int
    waiting: int
    running_interactive: int
    running_yielding: int
    yielding_tokens: int
    max_num_seqs: int
    steps_total: int
    preemptions_total: int
    cached_tokens_total: int
    offloaded_blocks_total: int
    loaded_blocks_total: int
    late_events_total: int
    stalls_total: int
    controller: ControllerState
