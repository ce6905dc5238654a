"""The sizes of one engine, chosen once, by whoever builds it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one engine. The first three shape the KV cache, the next six are SchedulerLimits.

    Runner and engine must be built with the same `block_size`, `num_blocks` and
    `num_host_blocks` (0: nothing is offloaded). `inter_token_target_s` is the pace, in seconds
    between tokens, that prompts and batch-class work must leave to interactive sequences.
    """

    block_size: int = 16
    num_blocks: int = 1024
    num_host_blocks: int = 0
    max_num_batched_tokens: int = 128
    chunk_size: int = 64
    max_num_seqs: int = 32
    max_waiting: int = 1024
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    inter_token_target_s: float = 0.04
