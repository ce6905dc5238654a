"""What a smaller dtype costs in quality: perplexity on a fixed text, and how often it agrees.

Both dtypes read the same windows of the text through the engine, as a prompt that is only to be
scored. Perplexity is exp of the mean negative log-likelihood of each token after the first of its
window. Agreement is the share of those places at which both would have said the same word.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.perplexity_text import TEXT
from benchmarks.result_file import write_results
from engine.engine_settings import EngineSettings
from engine.from_folder import engine_from_folder
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.interface.token_logprobs import TokenLogprob
from engine.text.tokenizer import Tokenizer

REFERENCE = "bfloat16"
MAX_RISE = 0.01
WINDOW_TOKENS = 512

SETTINGS = EngineSettings(
    num_blocks=512, max_num_batched_tokens=512, chunk_size=512, inter_token_target_s=3_600.0
)

Windows = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one dtype made of the text: log-likelihoods and its own choice at each place."""

    dtype: str
    logprobs: list[float]
    choices: list[int]

    @property
    def perplexity(self) -> float:
        """How many words it wavered between, so to speak."""
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Two readings of the same text."""

    reference: Reading
    other: Reading

    @property
    def rise(self) -> float:
        """By what share the perplexity is higher; negative if it is lower."""
        return self.other.perplexity / self.reference.perplexity - 1

    @property
    def agreement(self) -> float:
        """The share of places at which both choose the same token."""
        pairs = list(zip(self.reference.choices, self.other.choices, strict=True))
        return sum(one == other for one, other in pairs) / len(pairs)

    @property
    def is_met(self) -> bool:
        """Whether the rise is within its bar."""
        return self.rise <= MAX_RISE

    def table(self) -> str:
        """The measurement in words."""
        lines = [f"perplexity over {len(self.other.logprobs)} tokens of a fixed text"]
        for reading in (self.reference, self.other):
            lines.append(f"  {reading.dtype:<12} {reading.perplexity:8.3f}")
        lines += [
            f"  rise         {self.rise:8.2%}   (bar {MAX_RISE:.0%})",
            f"  same choice  {self.agreement:8.2%} of all places",
        ]
        return "\n".join(lines)

    def figures(self) -> dict[str, float | str]:
        """What is written to a file."""
        return {
            "dtype": self.other.dtype,
            "reference": self.reference.dtype,
            "num_tokens": float(len(self.other.logprobs)),
            "reference_perplexity": self.reference.perplexity,
            "perplexity": self.other.perplexity,
            "rise": self.rise,
            "agreement": self.agreement,
        }


def measure(folder: Path, dtype: str, max_tokens: int | None = None) -> Perplexity:
    """Read the text, or its first tokens, in the reference dtype and in the other."""
    tokens = Tokenizer.from_folder(folder).encode_plain(TEXT)[:max_tokens]
    windows = [
        tuple(tokens[start : start + WINDOW_TOKENS])
        for start in range(0, len(tokens) - 1, WINDOW_TOKENS)
    ]
    return Perplexity(read(folder, REFERENCE, windows), read(folder, dtype, windows))


def read(folder: Path, dtype: str, windows: Windows) -> Reading:
    """Score the windows with the model in one dtype. Raises RuntimeError if the engine cannot."""
    engine = engine_from_folder(folder, SETTINGS, dtype=dtype)
    scores: list[list[TokenLogprob]] = [[] for _ in windows]
    try:
        for number, window in enumerate(windows):
            engine.add(_request(number, window))
        while engine.has_work:
            for update in engine.step():
                if update.end not in (None, SequenceEnd.LENGTH):
                    raise RuntimeError(f"A window was not scored: {update.end} {update.message}")
                scores[int(update.request_id)] += update.prompt_logprobs or ()
    finally:
        engine.close()
    return reading_of(dtype, windows, scores)


def reading_of(dtype: str, windows: Windows, scores: Sequence[Sequence[TokenLogprob]]) -> Reading:
    """A reading from the scores of each window's tokens but the first."""
    assert [len(window) - 1 for window in windows] == list(map(len, scores))
    entries = [entry for window in scores for entry in window]
    return Reading(
        dtype,
        [entry.logprob for entry in entries],
        [entry.top_ids[0] for entry in entries],
    )


def main(folder: Path, dtype: str, file: Path | None) -> None:
    """Print the measurement on a model folder; the exit status says whether the bar was met."""
    result = measure(folder, dtype)
    sys.stdout.write(result.table() + "\n")
    write_results(file, "perplexity", result.figures())
    if not result.is_met:
        raise SystemExit(1)


def _request(number: int, window: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        prompts=(window,),
        sampling=SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=1),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="bench",
        arrival=0.0,
        deadline_at=float("inf"),
    )
