"""The body of POST /v1/completions, the older endpoint for raw prompts."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from control.protocol.generation_fields import GenerationFields
from control.protocol.strict_model import invalid, only, unsupported
from engine.interface.generation_request import MAX_SEQUENCES

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint

TokenIds = list[int]


def _as_prompts(prompt: object) -> list[str] | list[TokenIds]:
    """The prompts in one of two forms: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(
            "Must be a string, an array of strings, an array of token ids, or an array of such "
            "arrays, and not empty."
        )
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_SEQUENCES:
        raise invalid(f"At most {MAX_SEQUENCES} prompts are run at once.")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) and item and _are_token_ids(item) for item in prompt):
        return prompt
    raise invalid("Prompts must all be strings, or all non-empty arrays of integer token ids.")


def _are_token_ids(items: list[object]) -> bool:
    return all(type(item) is int for item in items)


class CompletionRequest(GenerationFields):
    """A completion as asked for."""

    prompt: Annotated[
        Any,
        BeforeValidator(
            _as_prompts, json_schema_input_type=str | list[str] | TokenIds | list[TokenIds]
        ),
    ]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    suffix: Annotated[Any, only("")] = None
    add_special_tokens: Annotated[Any, only(True)] = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        n = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == n:
            return self
        if self.best_of < n:
            raise invalid("Must not be less than n.", "best_of")
        raise unsupported("Only best_of equal to n is served.", "best_of")

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts: all texts, or all token ids."""
        prompts: list[str] | list[TokenIds] = self.prompt
        return prompts

    @property
    def default_max_output(self) -> int | None:
        """OpenAI's default for this endpoint."""
        return DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed at each token; None for no logprobs."""
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        """Whether the prompt is part of the answer."""
        return bool(self.echo)

    @property
    def continues_prompt(self) -> bool:
        """A completion's text goes on where the prompt's ended."""
        return True

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Echoed logprobs need the prompt scored, and so does an output of no tokens."""
        asked = [self.prompt_logprobs]
        if self.echo:
            asked += [self.logprobs, 0 if self.max_tokens == 0 else None]
        return max((count for count in asked if count is not None), default=None)
