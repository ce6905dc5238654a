"""The running state of one choice: its tokens so far, and how many of them are computed.

A sequence owes the tokens that it knows but that have no KV yet. Prompt tokens, tokens
resumed from an earlier attempt and the token sampled last are all the same debt.
"""

from dataclasses import dataclass

from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.kv_cache.kv_cache_manager import SequenceId


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    `token_ids` is prompt, then resumed tokens, then what was sampled here. `deadline` and
    `scheduled_at` are seconds on the engine's monotonic clock. `stop_ids` end the output.
    """

    id: SequenceId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority_class: PriorityClass
    deadline: float
    stop_ids: frozenset[int]
    num_computed_tokens: int = 0
    scheduled_at: float | None = None

    @property
    def num_owed_tokens(self) -> int:
        """Known tokens without KV; 1 for a sequence that is decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_tokens(self) -> int:
        """The most tokens the sequence can ever hold, prompt included."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def is_interactive(self) -> bool:
        """Interactive sequences are served before batch ones."""
        return self.priority_class is PriorityClass.INTERACTIVE

    @property
    def end(self) -> SequenceEnd | None:
        """Why the tokens known so far are all there will be, or None while more are wanted."""
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if num_output_tokens > self.sampling.min_tokens and self.token_ids[-1] in self.stop_ids:
            return SequenceEnd.STOP
        if num_output_tokens >= self.sampling.max_tokens:
            return SequenceEnd.LENGTH
        return None


def sequences_of(
    request: GenerationRequest, eos_token_ids: frozenset[int], deadline: float
) -> list[Sequence]:
    """The request's choices in order, ready to be queued."""
    sampling = request.sampling
    eos = frozenset() if sampling.ignore_eos else eos_token_ids
    return [
        Sequence(
            id=SequenceId(request.request_id, choice),
            token_ids=[*request.prompt_of(choice), *request.resumed_of(choice)],
            num_prompt_tokens=len(request.prompt_of(choice)),
            sampling=sampling,
            priority_class=request.priority_class,
            deadline=deadline,
            stop_ids=eos | frozenset(sampling.stop_token_ids),
        )
        for choice in range(request.num_choices)
    ]
