"""Sequences for tests of what lies beneath the engine."""

from engine.interface.sampling_params import SamplingParams
from engine.kv_cache.prefix_chain import PrefixChain
from engine.scheduling.scheduler_output import SequenceSpec
from engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4


def sequence(
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    name: str = "a",
    max_tokens: int = 8,
    order: int = 0,
    is_interactive: bool = True,
    num_preemptions: int = 0,
    scope: str = "scope",
    resumed: tuple[int, ...] = (),
    block_size: int = BLOCK_SIZE,
) -> Sequence:
    token_ids = [*prompt, *resumed]
    return Sequence(
        spec=SequenceSpec(name, 0, len(prompt), SamplingParams(max_tokens=max_tokens)),
        prefix=PrefixChain(scope, token_ids, block_size),
        token_ids=token_ids,
        is_interactive=is_interactive,
        stop_ids=frozenset({0}),
        order=order,
        num_preemptions=num_preemptions,
    )


class Expecting:
    """Foresees the same output length for everybody, until told otherwise."""

    def __init__(self, num_tokens: int = 1_000_000) -> None:
        self.num_tokens = num_tokens
        self.seen: list[tuple[str, int, bool]] = []

    def expected_output(self, cache_scope: str, num_output_tokens: int, max_tokens: int) -> int:
        return min(max_tokens, max(self.num_tokens, num_output_tokens + 1))

    def observe(self, cache_scope: str, num_output_tokens: int, is_complete: bool) -> None:
        self.seen.append((cache_scope, num_output_tokens, is_complete))
