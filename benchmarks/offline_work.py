"""The offline workloads, the same for every engine: decode at a batch, and prefill.

    decode rate  = batch x (output - 1) / (time with all output tokens - time with one)
    prefill rate = prompts x their length / time until each has its first token

Every call draws fresh random prompts, so that nothing is ever found in a prefix cache. Standard
library only: this file also runs in the environments of other engines.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Ordinary tokens of a vocabulary of 49,152; none of them ends an output.
FIRST_TOKEN, LAST_TOKEN = 1_000, 48_000

Prompts = list[list[int]]
# Runs all prompts together, greedily, to just so many tokens each; returns the tokens said.
Generate = Callable[[Prompts, int], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class OfflineWork:
    """`batch` prompts of `prompt` tokens; an output of one token makes it a prefill."""

    batch: int
    prompt: int = 128
    output: int = 128

    @property
    def name(self) -> str:
        """What tables and result files call it."""
        if self.output == 1:
            return f"prefill {self.batch}x{self.prompt}"
        return f"decode b{self.batch}"


DECODE_WORKS = tuple(OfflineWork(batch) for batch in (1, 8, 32, 64))
PREFILL_WORK = OfflineWork(batch=16, prompt=1_024, output=1)
OFFLINE_WORKS = (*DECODE_WORKS, PREFILL_WORK)


def random_prompts(count: int, length: int, rng: random.Random, shared: int = 0) -> Prompts:
    """Prompts of random token ids, of which the first `shared` are the same in all."""
    beginning = _draw(shared, rng)
    return [beginning + _draw(length - shared, rng) for _ in range(count)]


def tokens_per_second(generate: Generate, work: OfflineWork, rng: random.Random) -> float:
    """The work's rate. Raises RuntimeError if the engine said more or fewer tokens."""
    first_s = _timed(generate, work, 1, rng)
    if work.output == 1:
        return work.batch * work.prompt / first_s
    whole_s = _timed(generate, work, work.output, rng)
    return work.batch * (work.output - 1) / max(whole_s - first_s, 1e-9)


def warm_up(generate: Generate, rng: random.Random) -> None:
    """Two short requests, so that what is done once is not measured."""
    _timed(generate, OfflineWork(batch=2, prompt=32), 4, rng)


def _timed(generate: Generate, work: OfflineWork, output: int, rng: random.Random) -> float:
    prompts = random_prompts(work.batch, work.prompt, rng)
    started = time.perf_counter()
    said = generate(prompts, output)
    seconds = time.perf_counter() - started
    lengths = [len(tokens) for tokens in said]
    if lengths != [output] * work.batch:
        raise RuntimeError(f"{work.name}: {output} tokens were asked of each, {lengths} came")
    return seconds


def _draw(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
