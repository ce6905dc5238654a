"""The state of one choice: its tokens so far, and what the engine remembers of its past.

Prompt tokens, tokens resumed from an earlier attempt and the token sampled last are all the
same to the scheduler: tokens that are known and have to get KV.
"""

from dataclasses import dataclass, field

from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sequence_update import SequenceEnd, SequenceUpdate
from engine.interface.token_logprobs import TokenLogprob
from engine.kv_cache.prefix_chain import ChildKey, PrefixChain
from engine.scheduling.scheduler_output import SequenceSpec
from engine.scheduling.token_history import TokenHistory


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    `prefix.token_ids` is prompt, then resumed tokens, then what was sampled here; it is also
    `token_ids`. `scheduled_at` is in seconds on the engine's monotonic clock.
    `stop_ids` end the output. `order` says who came first. `is_pending` is true of a sequence
    that lost its place while a step in flight samples its next token. `num_cached_tokens`
    counts prompt tokens that were never computed for it, because their KV existed.

    `num_to_score` prompt tokens are wanted with their logprobs: all but the first, unless an
    earlier attempt came as far as an output token, and so reported them before. `num_scored`
    of them are reported. `history` is there only if sampling needs it.
    """

    spec: SequenceSpec
    prefix: PrefixChain
    token_ids: list[int]
    is_interactive: bool
    stop_ids: frozenset[int]
    order: int = -1
    is_pending: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    scheduled_at: float | None = None
    num_scored: int = 0
    max_tokens: int = field(init=False)
    num_to_score: int = field(init=False, default=0)
    history: TokenHistory | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        spec = self.spec
        # The most tokens the sequence can ever hold, prompt included.
        self.max_tokens = spec.num_prompt_tokens + spec.sampling.max_tokens
        if spec.sampling.prompt_logprobs is not None and not self.num_output_tokens:
            self.num_to_score = spec.num_prompt_tokens - 1
        if spec.sampling.needs_history:
            self.history = TokenHistory(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, resumed ones included."""
        return len(self.token_ids) - self.spec.num_prompt_tokens

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens still wait for their logprobs, so that KV found is no help."""
        return self.num_scored < self.num_to_score

    @property
    def end(self) -> SequenceEnd | None:
        """Why the tokens known so far are all there will be, or None while more are wanted."""
        token_ids = self.token_ids
        if self.is_scoring:
            return None
        if token_ids[-1] in self.stop_ids and self._may_stop:
            return SequenceEnd.STOP
        if len(token_ids) >= self.max_tokens:
            return SequenceEnd.LENGTH
        return None

    @property
    def _may_stop(self) -> bool:
        """Whether a stop token ends the output. A grammar lets one come only where it does."""
        sampling = self.spec.sampling
        num_output_tokens = self.num_output_tokens
        return num_output_tokens > (sampling.min_tokens if sampling.grammar is None else 0)

    def targets(self, start: int, count: int) -> list[int]:
        """The prompt tokens to be scored by computing `count` tokens from position `start`."""
        return self.token_ids[start + 1 : min(start + count, self.num_to_score) + 1]

    def take_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Of what was computed from position `start`: what has not been reported before."""
        if not scores:
            return ()
        assert start <= self.num_scored, "a prompt token's logprob was left out"
        new = scores[self.num_scored - start :]
        self.num_scored += len(new)
        return new

    def told(
        self,
        token_id: int | None,
        end: SequenceEnd | None,
        logprob: TokenLogprob | None = None,
        scores: tuple[TokenLogprob, ...] = (),
    ) -> SequenceUpdate:
        """The report of a token, of prompt tokens' logprobs, or of both, and of an end."""
        return SequenceUpdate(
            self.spec.request_id,
            self.spec.choice,
            () if token_id is None else (token_id,),
            end,
            self.num_cached_tokens,
            self.scheduled_at,
            logprobs=None if logprob is None else (logprob,),
            prompt_logprobs=scores or None,
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
    # An output that can only end needs a way to.
    is_endless = sampling.ignore_eos and sampling.grammar is None
    eos = frozenset() if is_endless else eos_token_ids
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
