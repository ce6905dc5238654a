"""Requests for tests, and running an engine to its end."""

from collections import defaultdict
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate

NEVER = 1e12
MAX_STEPS = 100_000


def order(
    request_id: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    resumed: tuple[tuple[int, ...], ...] = (),
    priority_class: PriorityClass = PriorityClass.INTERACTIVE,
    cache_scope: str = "scope",
    deadline_at: float = NEVER,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        sampling=sampling,
        priority_class=priority_class,
        cache_scope=cache_scope,
        arrival=0.0,
        deadline_at=deadline_at,
        resumed=resumed,
    )


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


@dataclass
class Transcript:
    """All that an engine said, by (request id, choice)."""

    token_ids: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, int], SequenceEnd] = field(default_factory=dict)
    num_cached_tokens: dict[tuple[str, int], int] = field(default_factory=dict)

    def note(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.request_id, update.choice)
            assert key not in self.ends, f"{key} spoke after its end"
            self.token_ids[key] += update.token_ids
            self.num_cached_tokens[key] = update.num_cached_tokens
            if update.end is not None:
                self.ends[key] = update.end


def run_to_end(
    engine: Engine, transcript: Transcript | None = None, *, is_overlapped: bool = False
) -> Transcript:
    transcript = transcript or Transcript()
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return transcript
        transcript.note(engine.step_overlapped() if is_overlapped else engine.step())
        engine.check()
    raise AssertionError(f"the engine still has work after {MAX_STEPS} steps")
