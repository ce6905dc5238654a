"""Strict request models, and how a broken rule is reported.

Types are strict: true is no integer, "10" no number, 1.0 no integer. A field that is known but
not served accepts the values that change nothing; any other is refused, never ignored. Messages
never repeat what the caller sent, except a field's name, escaped.
"""

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.interface.errors import InvalidRequest

MAX_PARAM_LENGTH = 64
UNSUPPORTED = "unsupported_parameter"
INVALID = "invalid_value"

_NOT_YET = "Not served yet; leave this field out."


class StrictModel(BaseModel):
    """Nothing is coerced, nothing unknown is accepted, nothing changes afterwards."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, fields: object) -> object:
        # Pydantic would make an error of every unknown field; a hostile body has very many.
        if isinstance(fields, dict):
            known = _names_of(cls)
            for name in fields:
                if name not in known:
                    message = "This field is not known here."
                    context = {"message": message, "member": name}
                    raise PydanticCustomError(UNSUPPORTED, "{message}", context)
        return fields

    @classmethod
    def parse(cls, fields: Mapping[str, object]) -> Self:
        """The request, or InvalidRequest for the first rule it breaks."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            raise _as_invalid_request(details[0]) from None


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    """The fields' names on the wire."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def unsupported(message: str, param: str = "") -> PydanticCustomError:
    """Something well-formed that is not served. `param` is for checks of a whole model."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message, "param": param})


def invalid(message: str, param: str = "") -> PydanticCustomError:
    """A value that breaks a rule. `param` is for checks of a whole model."""
    return PydanticCustomError(INVALID, "{message}", {"message": message, "param": param})


def only(*accepted: object) -> BeforeValidator:
    """Accept null and the values that change nothing; refuse all others."""

    def check(value: object) -> object:
        if value is None or any(type(value) is type(a) and value == a for a in accepted):
            return value
        raise unsupported(_NOT_YET)

    return BeforeValidator(check)


def check_real(value: float) -> float:
    """The number, if it is one that means what it says."""
    is_negative_zero = value == 0 and math.copysign(1, value) < 0
    if is_negative_zero or 0 < abs(value) < sys.float_info.min:
        raise invalid("Must not be a negative zero or a subnormal number.")
    return value


def _check_text(value: str) -> str:
    if "\0" in value:
        raise invalid("Must not hold the NUL character.")
    return value


Real = Annotated[float, AfterValidator(check_real)]
ShortText = Annotated[str, StringConstraints(max_length=64), AfterValidator(_check_text)]
MetadataText = Annotated[str, StringConstraints(max_length=512), AfterValidator(_check_text)]
Unserved = Annotated[Any, only()]


def _as_invalid_request(detail: ErrorDetails) -> InvalidRequest:
    context = detail.get("ctx") or {}
    location = detail["loc"]
    if "member" in context:
        location = (*location, str(context["member"]))
    param = str(context.get("param") or _param_of(location))
    if detail["type"] == "missing":
        message, code = f"{param} is required.", "missing_required_parameter"
    else:
        message = f"{param}: {detail['msg']}"
        code = UNSUPPORTED if detail["type"] == UNSUPPORTED else INVALID
    return InvalidRequest(message, param=param, code=code)


def _param_of(location: tuple[int | str, ...]) -> str:
    """`messages[0].role` for ("messages", 0, "role"), in printable ASCII of bounded length."""
    param = ""
    for step in location:
        param += f"[{step}]" if isinstance(step, int) else f".{step[:MAX_PARAM_LENGTH]}"
    escaped = param.removeprefix(".").encode("ascii", "backslashreplace").decode()
    printable = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in escaped)
    return printable[:MAX_PARAM_LENGTH] or "(empty)"
