"""The bodies of the administering routes. Times are whole seconds from now."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from control.identity.administration import MAX_ROTATION_GRACE_S
from control.identity.keys import MAX_LIFE_S, MAX_RESUME_GRACE_S
from control.identity.quotas import Limits
from control.identity.tenants import MAX_NAME
from control.protocol.strict_model import StrictModel, invalid

MAX_AT_ONCE = 2**31 - 1
MAX_TOKENS = 2**53

Scope = Literal["inference", "batch", "usage", "admin"]


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise invalid("Must hold printable characters only.")
    return value


Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME), AfterValidator(_check_printable)]
Label = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_check_printable)]
LifeS = Annotated[int, Field(ge=1, le=MAX_LIFE_S)]
ResumeGraceS = Annotated[int, Field(ge=0, le=MAX_RESUME_GRACE_S)]
Amount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class NewTenant(StrictModel):
    """POST /admin/tenants and POST /admin/tenants/{tenant_id}."""

    name: Name


class NewKey(StrictModel):
    """POST /admin/keys. Without a tenant the asking key's own is meant."""

    scopes: Annotated[list[Scope], Field(min_length=1, max_length=8)]
    tenant_id: str | None = None
    name: Label = ""
    expires_in_s: LifeS | None = None
    resume_grace_s: ResumeGraceS = 0


class KeyChange(StrictModel):
    """POST /admin/keys/{key_id}: what is left out stays."""

    name: Label | None = None
    resume_grace_s: ResumeGraceS | None = None


class Rotation(StrictModel):
    """POST /admin/keys/{key_id}/rotate. Without an end of its own, the new key ends when the old
    one would have.
    """

    grace_s: Annotated[int, Field(ge=0, le=MAX_ROTATION_GRACE_S)]
    expires_in_s: LifeS | None = None


class NewQuota(StrictModel):
    """PUT /admin/tenants/{tenant_id}/quotas/{model}: what is left out is not limited."""

    tokens_per_minute: Amount | None = None
    requests_per_minute: Amount | None = None
    max_concurrent: Annotated[int, Field(ge=1, le=MAX_AT_ONCE)] | None = None
    max_enqueued_tokens: Amount | None = None

    @model_validator(mode="after")
    def _check_limits_something(self) -> "NewQuota":
        if self.limits == Limits():
            raise invalid("Name a limit; DELETE lifts all of them.", "tokens_per_minute")
        return self

    @property
    def limits(self) -> Limits:
        """The limits as they are stored."""
        return Limits(
            self.tokens_per_minute,
            self.requests_per_minute,
            self.max_concurrent,
            self.max_enqueued_tokens,
        )


BODIES: dict[tuple[str, str], type[StrictModel]] = {
    ("/admin/tenants", "post"): NewTenant,
    ("/admin/tenants/{tenant_id}", "post"): NewTenant,
    ("/admin/tenants/{tenant_id}/quotas/{model}", "put"): NewQuota,
    ("/admin/keys", "post"): NewKey,
    ("/admin/keys/{key_id}", "post"): KeyChange,
    ("/admin/keys/{key_id}/rotate", "post"): Rotation,
}
