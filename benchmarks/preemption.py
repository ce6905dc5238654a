"""Losing one's place changes no word: a real model with and without room for all.

The same greedy requests run three times in float32: with KV for everybody, with KV for a few
and a predictor that always believes in one more token, and so again without a host tier. The
watermarks, which would keep admission from causing what is to be seen here, are off. The words
must be those of the first run, up to ties.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.first_differences import TIE_LOGITS, Difference, first_differences
from benchmarks.kv_admission import FitsNow
from benchmarks.real_text import pieces, text_tokens
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.engine_stats import EngineStats
from engine.execution.model_runner import ModelRunner
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder
from engine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for, and for how many whole sequences there is room.

    Every sequence comes to `num_tokens` tokens; prompts are `prompt_tokens` (least, most) long.
    More than `min_preemptions` in each run is what makes the measurement worth something.
    """

    num_requests: int = 64
    num_tokens: int = 2_000
    prompt_tokens: tuple[int, int] = (200, 600)
    num_fitting: int = 12
    max_num_batched_tokens: int = 512
    min_preemptions: int = 100

    @property
    def blocks_per_sequence(self) -> int:
        """What a sequence holds at its end."""
        return -(-self.num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run came to. `num_failures` counts ends other than that by length."""

    name: str
    words: dict[int, list[int]]
    num_failures: int
    stats: EngineStats
    seconds: float


@dataclass(frozen=True, slots=True)
class Preemption:
    """The run with room for all, then the others with their differences from it."""

    load: Load
    alone: Run
    others: list[tuple[Run, list[Difference]]]

    @property
    def is_met(self) -> bool:
        """No failure, enough preemptions, and no difference but ties."""
        runs = [run for run, _ in self.others]
        return (
            not any(run.num_failures for run in (self.alone, *runs))
            and all(run.stats.preemptions_total > self.load.min_preemptions for run in runs)
            and all(found.is_tie for _, differences in self.others for found in differences)
        )

    def table(self) -> str:
        """The measurement in words."""
        load = self.load
        lines = [
            f"{load.num_requests} sequences of {load.num_tokens} tokens, KV for "
            f"{load.num_fitting}, float32, everybody believed to need one token more",
            f"  {'run':<14} {'finished':>8} {'failed':>6} {'preempted':>9} {'offloaded':>9} "
            f"{'loaded':>7} {'differ':>6} {'seconds':>8}",
        ]
        for run, differences in [(self.alone, []), *self.others]:
            stats = run.stats
            lines.append(
                f"  {run.name:<14} {len(run.words) - run.num_failures:8} {run.num_failures:6} "
                f"{stats.preemptions_total:9} {stats.offloaded_blocks_total:9} "
                f"{stats.loaded_blocks_total:7} {len(differences):6} {run.seconds:8.1f}"
            )
        for run, differences in self.others:
            for found in differences:
                lines.append(f"  {run.name}: {found}")
        lines.append(
            f"  bar: preemptions > {load.min_preemptions}, no failure, no difference but ties "
            f"(gap < {TIE_LOGITS:g}): {'met' if self.is_met else 'MISSED'}"
        )
        return "\n".join(lines)


def measure(decoder: Decoder, prompts: Sequence[tuple[int, ...]], load: Load) -> Preemption:
    """Run the prompts with room for all, then twice without; compare every word."""
    num_all = load.num_requests * load.blocks_per_sequence
    num_few = load.num_fitting * load.blocks_per_sequence
    alone = _run("room for all", decoder, prompts, load, (num_all, 0))
    others = []
    for name, num_host_blocks in (("host tier on", num_few), ("host tier off", 0)):
        run = _run(name, decoder, prompts, load, (num_few, num_host_blocks))
        sys.stderr.write(f"{name}: {run.stats.preemptions_total} in {run.seconds:.0f} s\n")
        others.append((run, first_differences(decoder, prompts, alone.words, run.words)))
    return Preemption(load, alone, others)


def main(folder: Path, load: Load) -> None:
    """Print the measurement on a model folder; the exit status says whether the bar was met."""
    random = Random(1)
    lengths = [random.randint(*load.prompt_tokens) for _ in range(load.num_requests)]
    tokens = text_tokens(Tokenizer.from_folder(folder), sum(lengths))
    result = measure(load_decoder(folder, "float32"), pieces(tokens, lengths), load)
    sys.stdout.write(result.table() + "\n")
    if not result.is_met:
        raise SystemExit(1)


def _run(
    name: str,
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    load: Load,
    num_blocks: tuple[int, int],
) -> Run:
    settings = EngineSettings(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks[0],
        num_host_blocks=num_blocks[1],
        max_num_batched_tokens=load.max_num_batched_tokens,
        chunk_size=load.max_num_batched_tokens // 2,
        max_num_seqs=load.num_requests,
        high_watermark=1.0,
        low_watermark=1.0,
        # The pace is not what is measured here.
        inter_token_target_s=3600.0,
    )
    runner = ModelRunner(decoder, settings.num_blocks, BLOCK_SIZE, settings.num_host_blocks)
    engine = Engine(runner, settings, predictor=FitsNow())
    for number, prompt in enumerate(prompts):
        engine.add(_request(number, prompt, load.num_tokens))
    words: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    num_failures = 0
    started = time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            words[int(update.request_id)] += update.token_ids
            num_failures += update.end not in (None, SequenceEnd.LENGTH)
    seconds = time.perf_counter() - started
    engine.check()
    num_failures += sum(
        len(prompts[number]) + len(said) != load.num_tokens for number, said in words.items()
    )
    return Run(name, words, num_failures, engine.stats(), seconds)


def _request(number: int, prompt: tuple[int, ...], num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompts=(prompt,),
        sampling=SamplingParams(
            max_tokens=num_tokens - len(prompt), temperature=0.0, ignore_eos=True
        ),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )
