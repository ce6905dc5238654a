"""No key mints a wider key, and what is out of reach is as if it were not there."""

from datetime import UTC, datetime, timedelta

import pytest

from control.errors import PermissionDenied
from control.identity.authority import Administrator, KeyReach
from control.identity.keys import SCOPES, KeyWish
from control.identity.tenants import Tenant

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OPERATOR = Tenant("tnt_operator", "operator", NOW, is_operator=True)
CUSTOMER = Tenant("tnt_customer", "customer", NOW)
OTHER = Tenant("tnt_other", "other", NOW)
EVERY_SCOPE = frozenset(SCOPES)
PERSON = Administrator("user", "ann@host", None, None)


def key_of(tenant: Tenant, *scopes: str, ends: datetime | None = None) -> Administrator:
    reach = KeyReach(tenant.tenant_id, tenant.is_operator, frozenset(scopes), ends)
    return Administrator("key", "key_1", "req_1", reach)


def wish(*scopes: str, ends: datetime | None = None) -> KeyWish:
    return KeyWish(frozenset(scopes), expires_at=ends)


def test_a_person_and_an_operator_reach_everybody_and_a_tenant_itself_alone() -> None:
    for everywhere in (PERSON, key_of(OPERATOR, "admin")):
        everywhere.check_is_operator()
        assert all(everywhere.reaches(each.tenant_id) for each in (OPERATOR, CUSTOMER, OTHER))
    alone = key_of(CUSTOMER, "admin")
    assert [alone.reaches(each.tenant_id) for each in (OPERATOR, CUSTOMER, OTHER)] == [
        False,
        True,
        False,
    ]
    with pytest.raises(PermissionDenied):
        alone.check_is_operator()


@pytest.mark.parametrize(
    ("administrator", "tenant", "scopes"),
    [
        (PERSON, OPERATOR, SCOPES),
        (key_of(OPERATOR, "admin"), CUSTOMER, SCOPES),
        (key_of(OPERATOR, "admin"), OPERATOR, ("admin",)),
        (key_of(CUSTOMER, "admin", "batch"), CUSTOMER, ("batch",)),
        (key_of(CUSTOMER, *SCOPES), CUSTOMER, SCOPES),
    ],
)
def test_a_key_that_is_no_wider_is_minted(
    administrator: Administrator, tenant: Tenant, scopes: tuple[str, ...]
) -> None:
    administrator.check_may_mint(tenant, wish(*scopes))


@pytest.mark.parametrize(
    ("administrator", "tenant", "scopes"),
    [
        (key_of(OPERATOR, "admin"), OPERATOR, ("inference",)),
        (key_of(CUSTOMER, "admin"), CUSTOMER, ("inference",)),
        (key_of(CUSTOMER, "admin", "batch"), CUSTOMER, ("batch", "usage")),
    ],
)
def test_a_key_with_more_scopes_is_refused(
    administrator: Administrator, tenant: Tenant, scopes: tuple[str, ...]
) -> None:
    with pytest.raises(PermissionDenied, match="lacks the scope"):
        administrator.check_may_mint(tenant, wish(*scopes))


def test_a_key_that_ends_makes_none_that_lives_longer() -> None:
    end, later = NOW + timedelta(days=1), NOW + timedelta(days=2)
    for tenant in (CUSTOMER, OPERATOR):
        ending = key_of(tenant, "admin", ends=end)
        ending.check_may_mint(tenant, wish("admin", ends=end))
        for beyond in (later, None):
            with pytest.raises(PermissionDenied, match="longer"):
                ending.check_may_mint(tenant, wish("admin", ends=beyond))
    # An operator's key makes keys of others that stay when it is gone: they reach less.
    key_of(OPERATOR, "admin", ends=end).check_may_mint(CUSTOMER, wish("admin"))
