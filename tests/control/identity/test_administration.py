"""What administrators do is done and written down together, or not at all."""

import secrets
from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from control.database.connection import connect, connect_async
from control.errors import Conflict, ModelNotFound, NotFound, PermissionDenied
from control.identity.administration import Administration
from control.identity.audit import AuditFilter, AuditRecord, list_audit
from control.identity.authority import Administrator, KeyReach
from control.identity.keys import ApiKey, KeyWish, find_key, hash_key, list_keys
from control.identity.page import Page
from control.identity.quotas import Limits, list_quotas
from control.identity.tenants import Tenant, list_tenants
from engine.interface.errors import InvalidRequest

PEPPER = b"p" * 32
PERSON = Administrator("user", "ann@host", None, None)
INFERENCE = frozenset({"inference"})


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = connect(database_url, "test")
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.begin() as connection:
        yield connection


def new_tenant(acts: Administration) -> Tenant:
    return acts.add_tenant(f"tenant-{secrets.token_hex(6)}")


def records(connection: Connection, **only: str) -> list[AuditRecord]:
    """Oldest first."""
    found, has_more = list_audit(connection, AuditFilter(**only), Page(1000))
    assert not has_more
    return found[::-1]


async def test_a_rotated_key_works_until_the_stated_time_and_its_successor_after(
    database_url: str, engine: Engine
) -> None:
    with engine.begin() as connection:
        acts = Administration(connection, PERSON)
        tenant = new_tenant(acts)
        first, old_secret = acts.mint_key(
            PEPPER, tenant.tenant_id, KeyWish(INFERENCE, "laptop", resume_grace_s=7)
        )
        old, new, new_secret = acts.rotate_key(PEPPER, first.key_id, 3600)
        assert old.expires_at == acts.now() + timedelta(hours=1)
        assert old.replaced_by == new.key_id
        assert (new.scopes, new.name, new.resume_grace_s) == (INFERENCE, "laptop", 7)
        assert new.expires_at is None
        with pytest.raises(Conflict, match=new.key_id):
            acts.rotate_key(PEPPER, first.key_id, 3600)
    # A new pool: nothing of this is kept in a process.
    database = connect_async(database_url, "test")
    async with database.connect() as reader:
        found = await find_key(reader, hash_key(PEPPER, old_secret))
        assert found is not None
        assert found.lives_s is not None
        assert 3590 < found.lives_s <= 3600
        successor = await find_key(reader, hash_key(PEPPER, new_secret))
        assert successor is not None
        assert successor.lives_s is None
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE api_keys SET expires_at = now() WHERE key_id = :id"),
            {"id": first.key_id},
        )
    async with database.connect() as reader:
        assert await find_key(reader, hash_key(PEPPER, old_secret)) is None
        assert await find_key(reader, hash_key(PEPPER, new_secret)) == successor
    await database.dispose()


def test_a_rotation_without_grace_ends_the_old_key_at_once(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    key, _ = acts.mint_key(PEPPER, new_tenant(acts).tenant_id, KeyWish(INFERENCE))
    old, _, _ = acts.rotate_key(PEPPER, key.key_id, 0)
    assert old.expires_at == acts.now()
    with pytest.raises(Conflict):
        acts.rotate_key(PEPPER, key.key_id, 0)


def test_a_grace_never_prolongs_a_key_and_its_successor_ends_when_it_would_have(
    connection: Connection,
) -> None:
    acts = Administration(connection, PERSON)
    wish = KeyWish(INFERENCE, expires_at=acts.moment_in(60))
    key, _ = acts.mint_key(PEPPER, new_tenant(acts).tenant_id, wish)
    old, new, _ = acts.rotate_key(PEPPER, key.key_id, 3600)
    assert old.expires_at == new.expires_at == wish.expires_at


def test_keys_that_have_ended_are_not_rotated(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    tenant_id = new_tenant(acts).tenant_id
    revoked, _ = acts.mint_key(PEPPER, tenant_id, KeyWish(INFERENCE))
    acts.revoke_key(revoked.key_id)
    expired, _ = acts.mint_key(PEPPER, tenant_id, KeyWish(INFERENCE, expires_at=acts.now()))
    for key, reason in ((revoked, "revoked"), (expired, "expired")):
        with pytest.raises(Conflict, match=reason):
            acts.rotate_key(PEPPER, key.key_id, 3600)
    with pytest.raises(Conflict, match="revoked already, at 20"):
        acts.revoke_key(revoked.key_id)


def test_every_change_is_on_record_with_who_what_before_and_after(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    tenant = new_tenant(acts)
    key, _ = acts.mint_key(PEPPER, tenant.tenant_id, KeyWish(INFERENCE))
    acts.change_key(key.key_id, "night shift", 5)
    _, new, _ = acts.rotate_key(PEPPER, key.key_id, 60)
    acts.revoke_key(new.key_id)
    acts.rename_tenant(tenant.tenant_id, tenant.name + " and sons")
    acts.suspend_tenant(tenant.tenant_id)
    acts.suspend_tenant(tenant.tenant_id)  # changes nothing, and is not written down
    acts.resume_tenant(tenant.tenant_id)
    acts.set_quota(tenant.tenant_id, "*", Limits(tokens_per_minute=1000))
    acts.set_quota(tenant.tenant_id, "*", Limits(max_concurrent=4))
    acts.remove_quota(tenant.tenant_id, "*")

    told = records(connection, tenant_id=tenant.tenant_id)
    assert [(each.action, each.object_id) for each in told] == [
        ("tenant.create", tenant.tenant_id),
        ("key.create", key.key_id),
        ("key.change", key.key_id),
        ("key.create", new.key_id),
        ("key.rotate", key.key_id),
        ("key.revoke", new.key_id),
        ("tenant.rename", tenant.tenant_id),
        ("tenant.suspend", tenant.tenant_id),
        ("tenant.resume", tenant.tenant_id),
        ("quota.set", "*"),
        ("quota.set", "*"),
        ("quota.remove", "*"),
    ]
    assert {(each.actor_type, each.actor_id) for each in told} == {("user", "ann@host")}
    assert told[0].before is None
    changed = told[2]
    assert changed.before is not None
    assert changed.after is not None
    assert (changed.before["name"], changed.after["name"]) == ("", "night shift")
    assert told[-1].after is None
    replaced = told[-2].before
    assert replaced is not None
    assert replaced["tokens_per_minute"] == 1000


def test_a_change_that_is_not_kept_leaves_no_record(engine: Engine) -> None:
    with engine.connect() as connection:
        tenant = new_tenant(Administration(connection, PERSON))
        connection.rollback()
        assert records(connection, object_id=tenant.tenant_id) == []


def test_no_secret_is_on_record(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    key, secret = acts.mint_key(PEPPER, new_tenant(acts).tenant_id, KeyWish(INFERENCE))
    _, _, other_secret = acts.rotate_key(PEPPER, key.key_id, 60)
    everything = connection.execute(
        text("SELECT coalesce(string_agg(to_jsonb(a)::text, ''), '') FROM audit_log a")
    ).scalar_one()
    for each in (secret, other_secret):
        assert each[7:] not in everything
        assert hash_key(PEPPER, each).hex() not in everything


@pytest.mark.parametrize(
    "statement",
    ["UPDATE audit_log SET actor_id = 'x'", "DELETE FROM audit_log", "TRUNCATE audit_log"],
)
def test_what_is_on_record_stays(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        new_tenant(Administration(connection, PERSON))
    with (
        pytest.raises(DBAPIError, match="append-only"),
        engine.begin() as connection,
    ):
        connection.execute(text(statement))


def test_what_is_out_of_reach_is_as_if_it_were_not_there(connection: Connection) -> None:
    person = Administration(connection, PERSON)
    mine, other = new_tenant(person), new_tenant(person)
    others_key, _ = person.mint_key(PEPPER, other.tenant_id, KeyWish(INFERENCE))
    reach = KeyReach(mine.tenant_id, False, frozenset({"admin", "inference"}), None)
    acts = Administration(connection, Administrator("key", "key_1", "req_1", reach))
    unknown = "tnt_" + "0" * 24
    for tenant_id in (other.tenant_id, unknown):
        with pytest.raises(NotFound, match=f"There is no tenant '{tenant_id}'."):
            acts.tenant(tenant_id)
        with pytest.raises(NotFound, match=f"There is no tenant '{tenant_id}'."):
            acts.mint_key(PEPPER, tenant_id, KeyWish(INFERENCE))
        with pytest.raises(PermissionDenied):
            acts.set_quota(tenant_id, "*", Limits(max_concurrent=1))
    for key_id in (others_key.key_id, "key_" + "0" * 24, "no key at all\0"):
        for act in (
            lambda key_id=key_id: acts.key(key_id),
            lambda key_id=key_id: acts.revoke_key(key_id),
            lambda key_id=key_id: acts.rotate_key(PEPPER, key_id, 0),
            lambda key_id=key_id: acts.change_key(key_id, "x", 1),
        ):
            with pytest.raises(NotFound, match="There is no key"):
                act()
    own, _ = acts.mint_key(PEPPER, mine.tenant_id, KeyWish(INFERENCE))
    assert acts.revoke_key(own.key_id).revoked_at is not None


def test_a_key_does_not_suspend_its_own_tenant(connection: Connection) -> None:
    operator = Administration(connection, PERSON).add_tenant(
        f"operator-{secrets.token_hex(6)}", is_operator=True
    )
    reach = KeyReach(operator.tenant_id, True, frozenset({"admin"}), None)
    acts = Administration(connection, Administrator("key", "key_1", None, reach))
    with pytest.raises(Conflict):
        acts.suspend_tenant(operator.tenant_id)


def test_pages_follow_each_other_without_gap_or_repeat_although_all_have_one_time(
    connection: Connection,
) -> None:
    """One transaction has one time: the order is by id, too."""
    acts = Administration(connection, PERSON)
    tenants = [new_tenant(acts) for _ in range(5)]
    owner = tenants[0].tenant_id
    keys = [acts.mint_key(PEPPER, owner, KeyWish(INFERENCE))[0] for _ in range(5)]
    for model in ("*",):
        acts.set_quota(owner, model, Limits(max_concurrent=1))

    seen: list[ApiKey] = []
    after = None
    while True:
        page, has_more = list_keys(connection, owner, Page(2, after))
        seen += page
        if not has_more:
            break
        after = page[-1].key_id
    assert seen == sorted(keys, key=lambda key: key.key_id)

    ids = sorted(tenant.tenant_id for tenant in tenants)
    page_of_tenants, has_more = list_tenants(connection, Page(3, ids[1]))
    assert [each.tenant_id for each in page_of_tenants] == ids[2:]
    assert not has_more
    assert list_quotas(connection, owner, Page(1, "*")) == ([], False)


@pytest.mark.parametrize(
    "after", ["", "0", "key_x", "%", "_", "'", "\\", "\0", "x" * 5000, "9" * 40]
)
def test_a_cursor_that_names_nothing_is_refused(connection: Connection, after: str) -> None:
    acts = Administration(connection, PERSON)
    tenant_id = new_tenant(acts).tenant_id
    for read in (
        lambda: list_tenants(connection, Page(1, after)),
        lambda: list_keys(connection, None, Page(1, after)),
        lambda: list_quotas(connection, tenant_id, Page(1, after)),
        lambda: list_audit(connection, AuditFilter(), Page(1, after)),
    ):
        with pytest.raises(InvalidRequest, match="to go on after"):
            read()


def test_another_tenants_cursor_names_nothing(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    mine, other = new_tenant(acts), new_tenant(acts)
    key, _ = acts.mint_key(PEPPER, other.tenant_id, KeyWish(INFERENCE))
    (record,) = records(connection, object_id=key.key_id)
    with pytest.raises(InvalidRequest):
        list_keys(connection, mine.tenant_id, Page(1, key.key_id))
    with pytest.raises(InvalidRequest):
        list_audit(connection, AuditFilter(mine.tenant_id), Page(1, str(record.audit_id)))


def test_a_quota_needs_a_model_that_there_is(connection: Connection) -> None:
    acts = Administration(connection, PERSON)
    tenant_id = new_tenant(acts).tenant_id
    for model in ("no-such-model", "NO", "'", "\0", "*x"):
        with pytest.raises(ModelNotFound):
            acts.set_quota(tenant_id, model, Limits(max_concurrent=1))
        with pytest.raises(NotFound):
            acts.remove_quota(tenant_id, model)


def test_a_name_that_is_taken_is_refused_and_the_transaction_lives_on(
    connection: Connection,
) -> None:
    acts = Administration(connection, PERSON)
    first, second = new_tenant(acts), new_tenant(acts)
    with pytest.raises(Conflict):
        acts.rename_tenant(second.tenant_id, first.name)
    assert acts.tenant(second.tenant_id) == second
