"""The state of one choice: its tokens so far, and what the engine remembers of its past.

Prompt tokens, tokens resumed from an earlier attempt and the token sampled last are all the
same to the scheduler: tokens that are known and have to get KV.
"""

from dataclasses import dataclass, field

from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.kv_cache.prefix_chain import ChildKey, PrefixChain
from engine.scheduling.scheduler_output import SequenceSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    `prefix.token_ids` is prompt, then resumed tokens, then what was sampled here; it is also
    `token_ids`. `deadline`, `scheduled_at` are seconds on the engine's monotonic clock.
    `stop_ids` end the output. `order` says who came first. `is_pending` is true of a sequence
    that lost its place while a step in flight samples its next token. `num_cached_tokens`
    counts prompt tokens that were never computed for it, because their KV existed.
    """

    spec: SequenceSpec
    prefix: PrefixChain
    token_ids: list[int]
    is_interactive: bool
    stop_ids: frozenset[int]
    deadline: float = float("inf")
    order: int = -1
    is_pending: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        # The most tokens the sequence can ever hold, prompt included.
        self.max_tokens = self.spec.num_prompt_tokens + self.spec.sampling.max_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def end(self) -> SequenceEnd | None:
        """Why the tokens known so far are all there will be, or None while more are wanted."""
        token_ids, spec = self.token_ids, self.spec
        if (
            token_ids[-1] in self.stop_ids
            and len(token_ids) > spec.num_prompt_tokens + spec.sampling.min_tokens
        ):
            return SequenceEnd.STOP
        if len(token_ids) >= self.max_tokens:
            return SequenceEnd.LENGTH
        return None

    def said(self, token_id: int, end: SequenceEnd | None = None) -> SequenceUpdate:
        """The report of one more token."""
        return SequenceUpdate(
            self.spec.request_id,
            self.spec.choice,
            (token_id,),
            end,
            self.num_cached_tokens,
            self.scheduled_at,
        )

    def ended(self, end: SequenceEnd, message: str = "") -> SequenceUpdate:
        """The report of an end without a further token."""
        spec = self.spec
        return SequenceUpdate(
            spec.request_id,
            spec.choice,
            (),
            end,
            self.num_cached_tokens,
            self.scheduled_at,
            message,
        )


def sequences_of(
    request: GenerationRequest,
    eos_token_ids: frozenset[int],
    block_size: int,
    child_key: ChildKey,
) -> list[Sequence]:
    """The request's choices in order, ready to be queued. Names their blocks, so it takes time."""
    sampling = request.sampling
    eos = frozenset() if sampling.ignore_eos else eos_token_ids
    sequences = []
    for choice in range(request.num_choices):
        prompt = request.prompt_of(choice)
        token_ids = [*prompt, *request.resumed_of(choice)]
        sequences.append(
            Sequence(
                spec=SequenceSpec(request.request_id, choice, len(prompt), sampling),
                prefix=PrefixChain(request.cache_scope, token_ids, block_size, child_key),
                token_ids=token_ids,
                is_interactive=request.priority_class is PriorityClass.INTERACTIVE,
                stop_ids=eos | frozenset(sampling.stop_token_ids),
            )
        )
    return sequences
