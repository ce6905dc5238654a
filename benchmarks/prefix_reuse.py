"""What sharing beginnings saves, and that nothing of it is lost or seen by others.

A burst with one common beginning computes it once; the choices of a request share their prompt;
another scope finds nothing; and whatever is started and cancelled gives all its blocks back.
The machine computes nothing and only counts: the same numbers come out everywhere.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from benchmarks.idle_machine import VOCAB_SIZE, IdleMachine
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams

SETTINGS = EngineSettings(
    num_blocks=4_096,
    num_host_blocks=512,
    max_num_batched_tokens=2_048,
    chunk_size=512,
    max_num_seqs=64,
)
NUM_REQUESTS = 32
SHARED_TOKENS = 768
PROMPT_TOKENS = 800
OUTPUT_TOKENS = 16
NUM_CHOICES = 4
NUM_CYCLES = 1_000

MAX_COMPUTED_RATIO = 1.1
MAX_CHOICES_RATIO = 1.3


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """Prompt tokens computed and found, and blocks held at most, of each experiment."""

    burst_computed: int
    burst_unique: int
    other_scope_cached: int
    repeat_cached: int
    blocks_of_one: int
    blocks_of_all_choices: int
    blocks_lost: int

    @property
    def is_met(self) -> bool:
        """All bars at once."""
        return (
            self.burst_computed <= MAX_COMPUTED_RATIO * self.burst_unique
            and self.other_scope_cached == 0
            and self.repeat_cached >= SHARED_TOKENS
            and self.blocks_of_all_choices <= MAX_CHOICES_RATIO * self.blocks_of_one
            and self.blocks_lost == 0
        )

    def table(self) -> str:
        """The measurement in words."""
        computed = self.burst_computed / self.burst_unique
        choices = self.blocks_of_all_choices / self.blocks_of_one
        return "\n".join(
            [
                f"{NUM_REQUESTS} prompts sharing {SHARED_TOKENS} of {PROMPT_TOKENS} tokens at once",
                f"  computed / unique tokens  {self.burst_computed} / {self.burst_unique} = "
                f"{computed:.3f}   (bar {MAX_COMPUTED_RATIO:g})",
                f"  another scope's hit       {self.other_scope_cached} tokens   (bar 0)",
                f"  the scope's own repeat    {self.repeat_cached} tokens   "
                f"(bar at least {SHARED_TOKENS})",
                f"  blocks, n={NUM_CHOICES} / n=1       {self.blocks_of_all_choices} / "
                f"{self.blocks_of_one} = {choices:.3f}   (bar {MAX_CHOICES_RATIO:g})",
                f"  {NUM_CYCLES} starts and cancels   {self.blocks_lost} blocks lost   (bar 0)",
            ]
        )


def measure(num_cycles: int = NUM_CYCLES, seed: int = 1) -> PrefixReuse:
    """All experiments, each on an engine of its own."""
    random = Random(seed)
    computed, unique, other_scope, repeat = _burst(random)
    prompt = _words(random, PROMPT_TOKENS)
    return PrefixReuse(
        burst_computed=computed,
        burst_unique=unique,
        other_scope_cached=other_scope,
        repeat_cached=repeat,
        blocks_of_one=_most_blocks(prompt, 1),
        blocks_of_all_choices=_most_blocks(prompt, NUM_CHOICES),
        blocks_lost=_lost_blocks(random, num_cycles),
    )


def main() -> None:
    """Print the measurement; the exit status says whether the bars were met."""
    result = measure()
    sys.stdout.write(result.table() + "\n")
    if not result.is_met:
        raise SystemExit(1)


def _burst(random: Random) -> tuple[int, int, int, int]:
    """Tokens computed and unique, then the hits of another scope and of the same one."""
    engine, machine = _engine()
    shared = _words(random, SHARED_TOKENS)
    own = [_words(random, PROMPT_TOKENS - SHARED_TOKENS) for _ in range(NUM_REQUESTS)]
    _run(engine, (_request(f"{i}", (*shared, *rest)) for i, rest in enumerate(own)))
    computed = machine.num_prompt_tokens
    unique = SHARED_TOKENS + NUM_REQUESTS * (PROMPT_TOKENS - SHARED_TOKENS)
    prompt = (*shared, *own[0])
    other_scope = _run(engine, [_request("other", prompt, scope="other")])
    repeat = _run(engine, [_request("repeat", prompt)])
    return computed, unique, other_scope, repeat


def _most_blocks(prompt: tuple[int, ...], num_choices: int) -> int:
    engine, _ = _engine()
    engine.add(_request("r", prompt, num_choices=num_choices))
    most = 0
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        most = max(most, stats.kv_blocks_total - stats.kv_blocks_free)
    return most


def _lost_blocks(random: Random, num_cycles: int) -> int:
    """Requests of any shape start, and are cancelled after any number of steps."""
    engine, _ = _engine()
    shared = _words(random, SHARED_TOKENS)
    at_start = engine.stats().kv_blocks_free
    for cycle in range(num_cycles):
        prompt = shared[: random.randint(1, SHARED_TOKENS)] + _words(random, random.randint(0, 40))
        request = _request(
            f"{cycle}", prompt, scope=random.choice("ab"), num_choices=random.choice([1, 1, 2, 4])
        )
        engine.add(request)
        for _ in range(random.randint(0, OUTPUT_TOKENS + 4)):
            # The overlapped order too: a cancel then meets a step in flight.
            if random.random() < 0.5:
                engine.step_overlapped()
            else:
                engine.step()
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
    engine.check()
    return at_start - engine.stats().kv_blocks_free


def _engine() -> tuple[Engine, IdleMachine]:
    machine = IdleMachine(0)
    return Engine(machine, SETTINGS, clock=machine.clock, monotonic=machine.clock), machine


def _run(engine: Engine, requests: Iterable[GenerationRequest]) -> int:
    """Run to the end; returns the most prompt tokens that any sequence found."""
    for request in requests:
        engine.add(request)
    num_cached = 0
    while engine.has_work:
        for update in engine.step():
            num_cached = max(num_cached, update.num_cached_tokens)
    return num_cached


def _request(
    request_id: str, prompt: tuple[int, ...], *, scope: str = "one", num_choices: int = 1
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, n=num_choices),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope=scope,
        arrival=0.0,
        deadline_at=float("inf"),
    )


def _words(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(1, VOCAB_SIZE), k=count))
