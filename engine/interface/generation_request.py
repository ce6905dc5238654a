"""What is to be generated: the immutable order that travels from the front door to a replica."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.interface.errors import InvalidRequest
from engine.interface.sampling_params import SamplingParams
from engine.interface.text_options import TextOptions

MAX_SEQUENCES = 32


class PriorityClass(StrEnum):
    """Interactive requests are served before batch ones, everywhere."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One accepted request.

    Choice index = prompt index x n + j, so `num_choices` sequences run, all on one replica.
    `resumed` holds, per choice, tokens that were already delivered by an earlier attempt:
    they are computed again but never sampled again. It is empty on a first attempt.
    `arrival` and `deadline_at` are seconds on the shared clock (`control.streams.clock`).
    `cache_scope` is opaque here: a prefix may be reused only inside one scope. `text` is for
    whoever makes text of the tokens, and `keeps_output` for whoever settles: what was said is to
    be found in the ledger's tables for a day.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    priority_class: PriorityClass
    cache_scope: str
    arrival: float
    deadline_at: float
    resumed: tuple[tuple[int, ...], ...] = ()
    text: TextOptions = field(default_factory=TextOptions)
    keeps_output: bool = False

    @property
    def num_choices(self) -> int:
        """How many sequences the request runs."""
        return len(self.prompts) * self.sampling.n

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever `n` is."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def max_kv_tokens(self) -> int:
        """KV slots the request can come to need when nothing is shared, over all choices."""
        per_choice = self.sampling.n * self.sampling.max_tokens * len(self.prompts)
        return self.num_prompt_tokens * self.sampling.n + per_choice

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """The prompt that the given choice continues."""
        return self.prompts[choice // self.sampling.n]

    def resumed_of(self, choice: int) -> tuple[int, ...]:
        """Tokens of the choice that an earlier attempt already delivered."""
        return self.resumed[choice] if self.resumed else ()

    def validate(self, vocab_size: int, max_model_len: int) -> None:
        """Raise InvalidRequest on the first rule broken. Called at the door and by the engine."""
        self.sampling.validate(vocab_size)
        if not self.prompts or not all(self.prompts):
            raise InvalidRequest("A prompt holds at least one token.", param="prompt")
        if self.num_choices > MAX_SEQUENCES:
            raise InvalidRequest(
                f"prompts x n is {self.num_choices}; at most {MAX_SEQUENCES} run at once.",
                param="n",
            )
        if self.resumed and len(self.resumed) != self.num_choices:
            raise InvalidRequest("One resumed entry per choice is needed.", param="resumed")
        for prompt in self.prompts:
            if not all(0 <= token_id < vocab_size for token_id in prompt):
                raise InvalidRequest(
                    f"Prompt token ids must lie in [0, {vocab_size}).", param="prompt"
                )
            if len(prompt) + self.sampling.max_tokens > max_model_len:
                raise InvalidRequest(
                    f"This model's context is {max_model_len} tokens; the prompt has "
                    f"{len(prompt)} and {self.sampling.max_tokens} more were requested.",
                    param="messages",
                    code="context_length_exceeded",
                )
