"""How the next token is to be chosen, as OpenAI and vLLM spell it.

Ranges are the engine's law (`SamplingParams.validate`) and are not repeated here; only types
are, and how many things of a kind are looked at before that.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from control.protocol.strict_model import Real, StrictModel, Unserved, check_real, invalid, only
from engine.interface.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_STRINGS

MAX_TOKEN_ID_DIGITS = 10


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's map, whose keys are token ids in the only spelling that JSON allows: strings."""
    if not isinstance(value, dict):
        raise invalid('Must map token ids to numbers, as in {"50256": -100}.')
    if len(value) > MAX_LOGIT_BIASES:
        raise invalid(f"Takes at most {MAX_LOGIT_BIASES} tokens.")
    return tuple((_as_token_id(key), _as_bias(bias)) for key, bias in value.items())


def _as_token_id(key: object) -> int:
    digits = key if isinstance(key, str) else ""
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_TOKEN_ID_DIGITS
    if not is_number or digits != str(int(digits)):
        raise invalid("Every key must be a token id in decimal digits.")
    return int(digits)


def _as_bias(bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise invalid("Every value must be a number.")
    return check_real(bias)


# The first bad item is enough: pydantic would otherwise make an error of each.
Stop = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_as_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class SamplingFields(StrictModel):
    """Fields that decide about tokens: first those that are served, then those that are not."""

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
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    logit_bias: Biases | None = None

    length_penalty: Annotated[Any, only(1, 1.0)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    bad_words: Annotated[Any, only([])] = None
    allowed_token_ids: Unserved = None
