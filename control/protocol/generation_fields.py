"""What the two generation endpoints ask alike.

Ranges of what is served are the engine's law (`SamplingParams.validate`) and are not repeated
here; only types, the bounds of stored texts, and what is not served are.
"""

from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from control.protocol.strict_model import (
    MetadataText,
    Real,
    ShortText,
    StrictModel,
    Unserved,
    invalid,
    only,
    only_number,
)
from control.protocol.structured_output import StructuredOutputFields
from engine.interface.errors import InvalidRequest
from engine.interface.sampling_params import SamplingParams

MAX_METADATA_PAIRS = 16

T = TypeVar("T")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_pairs(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA_PAIRS:
        raise invalid(f"Holds at most {MAX_METADATA_PAIRS} pairs.")
    return value


# The first bad item is enough: pydantic would otherwise make an error of each.
Stop = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Metadata = Annotated[dict[ShortText, MetadataText], BeforeValidator(_check_pairs)]


class StreamOptions(StrictModel):
    """How a stream reports. No padding is added, whatever `include_obfuscation` says."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StructuredOutputFields):
    """Fields of both endpoints: first those that are served, then those that are not."""

    model: str
    max_tokens: int | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: int | None = None
    min_p: Real | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    metadata: Metadata | None = None

    presence_penalty: Annotated[Any, only_number(0, -2, 2)] = None
    frequency_penalty: Annotated[Any, only_number(0, -2, 2)] = None
    repetition_penalty: Annotated[Any, only_number(1, 0, 2)] = None
    length_penalty: Annotated[Any, only(1, 1.0)] = None
    logit_bias: Annotated[Any, only({})] = None
    echo: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    return_token_ids: Annotated[Any, only(False)] = None
    bad_words: Annotated[Any, only([])] = None
    allowed_token_ids: Unserved = None
    prompt_logprobs: Unserved = None
    truncate_prompt_tokens: Unserved = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("Only allowed when stream is true.", "stream_options")
        return self

    @property
    def max_output(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output."""
        return "max_tokens", self.max_tokens

    @property
    def default_max_output(self) -> int | None:
        """The limit when none is given; None for as much as the model and its window allow."""
        return None

    @property
    def includes_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """True if every chunk of the stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int, minted_seed: int, vocab_size: int) -> SamplingParams:
        """The sampling asked for. Raises InvalidRequest.

        A top_k over the vocabulary means all of it, -1 means no limit.
        """
        top_k = 0 if self.top_k == -1 else min(_or(self.top_k, 0), vocab_size)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=top_k,
            min_p=_or(self.min_p, 0.0),
            min_tokens=_or(self.min_tokens, 0),
            stop=tuple(_or(self.stop, [])),
            stop_token_ids=tuple(_or(self.stop_token_ids, [])),
            ignore_eos=bool(self.ignore_eos),
            seed=_or(self.seed, minted_seed),
            n=_or(self.n, 1),
            grammar=None if self.constraint is None else self.constraint.grammar,
        )
        try:
            params.validate(vocab_size)
        except InvalidRequest as error:
            raise self._under_own_name(error) from None
        return params

    def _under_own_name(self, error: InvalidRequest) -> InvalidRequest:
        """The engine says max_tokens; the caller may have said max_completion_tokens."""
        name, _ = self.max_output
        if error.param != "max_tokens":
            return error
        message = str(error).replace("max_tokens", name, 1)
        return InvalidRequest(message, param=name, code=error.code)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
