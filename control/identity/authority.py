"""Who administers, and how far that reaches: a pure decision.

    administrator                        reaches             may mint a key with
    an operator's key with `admin`       every tenant        any scopes, for tenants that are no
                                                             operators; for operators, its own
    any other key with `admin`           its own tenant      its own scopes
    a person at the database (the CLI)   every tenant        any scopes

No key mints a wider one: not with more scopes, not for more tenants, and, inside its own reach,
not for longer than it lives itself. What lies outside an administrator's reach is answered like
what does not exist.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from control.errors import PermissionDenied
from control.identity.keys import KeyWish
from control.identity.tenants import Tenant


@dataclass(frozen=True, slots=True)
class KeyReach:
    """Of a key that administers: whose it is and what it may do itself."""

    tenant_id: str
    is_operator: bool
    scopes: frozenset[str]
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Administrator:
    """Somebody who administers: a key, or with no reach of a key's, a person at the database."""

    actor_type: Literal["key", "user"]
    actor_id: str
    request_id: str | None
    reach: KeyReach | None

    @property
    def only_tenant_id(self) -> str | None:
        """The one tenant that this administrator reaches; None if it reaches all."""
        return None if self.reach is None or self.reach.is_operator else self.reach.tenant_id

    def reaches(self, tenant_id: str) -> bool:
        """True if the tenant and its keys are this administrator's business."""
        return self.only_tenant_id in (None, tenant_id)

    def check_is_operator(self) -> None:
        """Raise PermissionDenied for the administrator of a single tenant."""
        if self.only_tenant_id is not None:
            raise PermissionDenied("Only an operator's key with the scope 'admin' may do this.")

    def check_may_mint(self, tenant: Tenant, wish: KeyWish) -> None:
        """Raise PermissionDenied for a key that could do what this administrator cannot."""
        reach = self.reach
        if reach is None or (reach.is_operator and not tenant.is_operator):
            return
        wider = sorted(wish.scopes - reach.scopes)
        if wider:
            raise PermissionDenied(
                f"This key lacks the scope {wider[0]!r} and cannot give it to another.",
                param="scopes",
            )
        if reach.expires_at is not None and (
            wish.expires_at is None or wish.expires_at > reach.expires_at
        ):
            raise PermissionDenied(
                "This key expires; what it makes must not live longer.", param="expires_in_s"
            )
