"""What a long prompt does to those who are reading: the time between their tokens.

Sixteen interactive readers stream from a real model; then one prompt of 4,000 tokens arrives. As in
a replica, the loop decides a step while another computes, and all of them read the clock when
their token comes out of the update queue. What is compared is one run's own before and during.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_text import pieces, text_tokens
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.from_folder import engine_from_folder
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.loop import EngineLoop
from engine.text.tokenizer import Tokenizer

MAX_P95_RATIO = 1.3
MAX_GAP_RATIO = 3.0

# As a replica has them unless told otherwise.
SETTINGS = EngineSettings(
    num_blocks=2_048,
    num_host_blocks=1_024,
    max_num_batched_tokens=256,
    chunk_size=128,
    max_num_seqs=32,
    inter_token_target_s=0.04,
)
LONG = "long"
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many read, from prompts of which length, and how many tokens each before it counts.

    A stream asks again after `stream_tokens` tokens, so that the decodes of the second half of the
    measurement look at no more context than those of the first.
    """

    num_streams: int = 16
    prompt_tokens: int = 128
    long_prompt_tokens: int = 4_000
    stream_tokens: int = 256
    # By then every stream has begun again, and they are spread over all lengths.
    num_warm_up: int = 300
    num_before: int = 240

    def first_length(self, number: int) -> int:
        """Output tokens of a stream's first request, so that the streams do not end together."""
        return 1 + self.stream_tokens * (number + 1) // self.num_streams


@dataclass(frozen=True, slots=True)
class Interference:
    """Milliseconds between tokens of the streams, before and while the long prompt computes."""

    load: Load
    before_ms: list[float]
    during_ms: list[float]
    first_token_s: float

    @property
    def p95_ratio(self) -> float:
        """How much slower the slow gaps have become."""
        return _p95(self.during_ms) / _p95(self.before_ms)

    @property
    def max_gap_ratio(self) -> float:
        """The longest gap, against those that were usual before."""
        return max(self.during_ms) / _p95(self.before_ms)

    def table(self) -> str:
        """The measurement in words."""
        load = self.load
        lines = [
            f"{load.num_streams} streams, then a prompt of {load.long_prompt_tokens} tokens; "
            "ms between tokens"
        ]
        for name, values in (("before", self.before_ms), ("during", self.during_ms)):
            p50 = statistics.median(values)
            lines.append(
                f"  {name:<8} p50 {p50:7.1f}   p95 {_p95(values):7.1f}   max {max(values):7.1f}   "
                f"({len(values)} gaps)"
            )
        lines += [
            f"  p95 during / before       {self.p95_ratio:6.2f}   (bar {MAX_P95_RATIO:g})",
            f"  max during / p95 before   {self.max_gap_ratio:6.2f}   (bar {MAX_GAP_RATIO:g})",
            f"  the long prompt's first token after {self.first_token_s:.1f} s",
        ]
        return "\n".join(lines)


def measure(
    folder: Path, settings: EngineSettings = SETTINGS, load: Load | None = None
) -> Interference:
    """Let the streams read, send the long prompt, and watch until its first token."""
    load = load or Load()
    engine = engine_from_folder(folder, settings, execution=ThreadedExecution)
    lengths = [load.prompt_tokens] * load.num_streams + [load.long_prompt_tokens]
    tokens = text_tokens(Tokenizer.from_folder(folder), sum(lengths))
    *prompts, long_prompt = pieces(tokens, lengths)
    loop = EngineLoop(engine)
    loop.start()
    try:
        return watch(loop, prompts, long_prompt, load)
    finally:
        loop.stop()


def watch(
    loop: EngineLoop, prompts: list[tuple[int, ...]], long_prompt: tuple[int, ...], load: Load
) -> Interference:
    """The same on any loop that runs: the streams read, the long prompt comes, and is watched."""
    lengths = {str(number): load.first_length(number) for number in range(len(prompts))}
    num_tokens = dict.fromkeys(lengths, 0)
    last_at: dict[str, float] = {}
    before_ms: list[float] = []
    during_ms: list[float] = []
    sent_at: float | None = None
    for stream, length in lengths.items():
        loop.try_submit(_request(stream, prompts[int(stream)], length))
    while True:
        updates = loop.updates.get(PATIENCE_S)
        if updates is None:
            raise RuntimeError("The engine died.") from loop.failure
        now = time.perf_counter()
        for update in updates:
            if update.end not in (None, SequenceEnd.LENGTH):
                raise RuntimeError(f"A stream ended: {update.end} {update.message}")
            if update.request_id == LONG:
                assert sent_at is not None
                return Interference(load, before_ms, during_ms, now - sent_at)
            stream = update.request_id.partition(".")[0]
            num_tokens[stream] += 1
            if num_tokens[stream] > load.num_warm_up and stream in last_at:
                gaps = before_ms if sent_at is None else during_ms
                gaps.append(1000 * (now - last_at[stream]))
            last_at[stream] = now
            if update.end is not None:
                # The same reader asks the same again: contexts stay as long as they were.
                del last_at[stream]
                again = f"{stream}.{num_tokens[stream]}"
                loop.try_submit(_request(again, prompts[int(stream)], load.stream_tokens))
        if sent_at is None and min(num_tokens.values()) >= load.num_warm_up + load.num_before:
            sent_at = time.perf_counter()
            loop.try_submit(_request(LONG, long_prompt, 1))


def main(folder: Path) -> None:
    """Print the measurement on a model folder; the exit status says whether the bars were met."""
    result = measure(folder)
    sys.stdout.write(result.table() + "\n")
    if result.p95_ratio > MAX_P95_RATIO or result.max_gap_ratio > MAX_GAP_RATIO:
        raise SystemExit(1)


def _request(request_id: str, prompt: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[18]
