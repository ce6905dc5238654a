"""What the two generation endpoints ask alike.

Ranges of what is served are the engine's law (`SamplingParams.validate`) and are not repeated
here; only types, the bounds of stored texts, and what is not served are.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Self, TypeVar

from pydantic import BeforeValidator, model_validator

from control.protocol.sampling_fields import SamplingFields
from control.protocol.shown_fields import ShownFields
from control.protocol.strict_model import MetadataText, ShortText, StrictModel, invalid, unsupported
from control.protocol.structured_output import StructuredOutputFields
from engine.interface.errors import InvalidRequest
from engine.interface.sampling_params import SamplingParams

MAX_METADATA_PAIRS = 16

T = TypeVar("T")


def _check_pairs(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA_PAIRS:
        raise invalid(f"Holds at most {MAX_METADATA_PAIRS} pairs.")
    return value


Metadata = Annotated[dict[ShortText, MetadataText], BeforeValidator(_check_pairs)]


class StreamOptions(StrictModel):
    """How a stream reports. No padding is added, whatever `include_obfuscation` says."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields, ShownFields, StructuredOutputFields):
    """Fields of both endpoints, and what they come to together."""

    model: str
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("Only allowed when stream is true.", "stream_options")
        return self

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("Only told in answers that are not streamed.", "prompt_logprobs")
        if self.truncate_prompt_tokens is None:
            return self
        if self.truncate_prompt_tokens < 1:
            raise invalid("Must be at least 1.", "truncate_prompt_tokens")
        if self.has_echo:
            raise unsupported("Not served together with echo.", "truncate_prompt_tokens")
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

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens the engine lists at each prompt token; None to score none."""
        return self.prompt_logprobs

    def truncated(self, prompt: Sequence[int]) -> Sequence[int]:
        """What is used of a prompt: its end, if no more is wanted."""
        return (
            prompt
            if self.truncate_prompt_tokens is None
            else prompt[-self.truncate_prompt_tokens :]
        )

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
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=_or(self.logit_bias, ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            grammar=None if self.constraint is None else self.constraint.grammar,
        )
        try:
            params.validate(vocab_size)
        except InvalidRequest as error:
            raise self._under_own_name(error) from None
        return params

    def _under_own_name(self, error: InvalidRequest) -> InvalidRequest:
        """The engine names its own fields; the caller may have set them by other names."""
        name = self.own_names.get(error.param, error.param)
        message = str(error).replace(error.param, name, 1)
        return InvalidRequest(message, param=name, code=error.code)

    @property
    def own_names(self) -> Mapping[str, str]:
        """What the caller calls fields of SamplingParams, where that differs."""
        return {"max_tokens": self.max_output[0]}


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
