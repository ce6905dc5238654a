"""Requests for tests, and running an engine to its end."""

from collections import defaultdict
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate

NEVER = 1e12


def order(
    request_id: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    resumed: tuple[tuple[int, ...], ...] = (),
    priority_class: PriorityClass = PriorityClass.INTERACTIVE,
    deadline_at: float = NEVER,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        sampling=sampling,
        priority_class=priority_class,
        cache_scope="scope",
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

    def note(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.request_id, update.choice)
            assert key not in self.ends, f"{key} spoke after its end"
            self.token_ids[key] += update.token_ids
            if update.end is not None:
                self.ends[key] = update.end


def run_to_end(engine: Engine, transcript: Transcript | None = None) -> Transcript:
    transcript = transcript or Transcript()
    while engine.has_work:
        transcript.note(engine.step())
        engine.check()
    return transcript
