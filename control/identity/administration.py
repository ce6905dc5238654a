"""What administrators do: each act checks their reach, changes rows, and is written down.

All of it happens in the caller's transaction. The command line and the HTTP routes call the same
functions, so they allow and record the same.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, text

from control.errors import Conflict
from control.identity.audit import AuditFilter, AuditRecord, Change, Showable, list_audit, record
from control.identity.authority import Administrator
from control.identity.keys import (
    ApiKey,
    KeyWish,
    change_key,
    create_key,
    get_key,
    list_keys,
    no_such_key,
    replace_key,
    revoke_key,
)
from control.identity.page import Page, bad_cursor
from control.identity.quotas import (
    Limits,
    Quota,
    find_quota,
    list_quotas,
    no_such_quota,
    remove_quota,
    set_quota,
)
from control.identity.tenants import (
    Tenant,
    create_tenant,
    find_tenant,
    list_tenants,
    no_such_tenant,
    rename_tenant,
    set_suspended,
)

MAX_ROTATION_GRACE_S = 30 * 86_400


class Administration:
    """The acts of one administrator in one transaction."""

    def __init__(self, connection: Connection, administrator: Administrator) -> None:
        self._connection = connection
        self._administrator = administrator

    def now(self) -> datetime:
        """The database's time, by which keys expire."""
        now = self._connection.execute(text("SELECT now()")).scalar_one()
        assert isinstance(now, datetime)
        return now

    def moment_in(self, seconds: int | None) -> datetime | None:
        """So many seconds from now; None for never."""
        return None if seconds is None else self.now() + timedelta(seconds=seconds)

    def add_tenant(self, name: str, *, is_operator: bool = False) -> Tenant:
        """A new tenant. Raises Conflict if the name is taken."""
        self._administrator.check_is_operator()
        tenant = create_tenant(self._connection, name, is_operator=is_operator)
        self._note("tenant.create", tenant.tenant_id, tenant.tenant_id, None, tenant)
        return tenant

    def tenant(self, tenant_id: str) -> Tenant:
        """The tenant. Raises NotFound, also for one out of reach."""
        if not self._administrator.reaches(tenant_id):
            raise no_such_tenant(tenant_id)
        return find_tenant(self._connection, tenant_id)

    def tenants(self, page: Page, name: str | None = None) -> tuple[list[Tenant], bool]:
        """One page of the tenants in reach, and whether there are more. Raises InvalidRequest."""
        only = self._administrator.only_tenant_id
        if only is None:
            return list_tenants(self._connection, page, name)
        if page.after is not None and page.after != only:
            raise bad_cursor("tenant", page.after)
        tenant = find_tenant(self._connection, only)
        is_there = page.after is None and name in (None, tenant.name)
        return [tenant] if is_there else [], False

    def rename_tenant(self, tenant_id: str, name: str) -> Tenant:
        """Another name for the tenant. Raises NotFound, or Conflict if the name is taken."""
        self._administrator.check_is_operator()
        before = find_tenant(self._connection, tenant_id, for_update=True)
        after = rename_tenant(self._connection, tenant_id, name)
        self._note("tenant.rename", tenant_id, tenant_id, before, after)
        return after

    def suspend_tenant(self, tenant_id: str) -> Tenant:
        """Refuse all keys of the tenant. Raises NotFound, or Conflict for one's own tenant."""
        self._administrator.check_is_operator()
        reach = self._administrator.reach
        if reach is not None and reach.tenant_id == tenant_id:
            raise Conflict("This key belongs to that tenant and would shut itself out.")
        return self._set_suspended("tenant.suspend", tenant_id, True)

    def resume_tenant(self, tenant_id: str) -> Tenant:
        """Take a suspended tenant's keys again. Raises NotFound."""
        self._administrator.check_is_operator()
        return self._set_suspended("tenant.resume", tenant_id, False)

    def mint_key(self, pepper: bytes, tenant_id: str, wish: KeyWish) -> tuple[ApiKey, str]:
        """A new key: its record, and the key itself, which is shown this once.

        Raises NotFound, or PermissionDenied for a key that is wider than the administrator.
        """
        tenant = self.tenant(tenant_id)
        self._administrator.check_may_mint(tenant, wish)
        key, secret = create_key(self._connection, pepper, tenant_id, wish)
        self._note("key.create", key.key_id, tenant_id, None, key)
        return key, secret

    def key(self, key_id: str) -> ApiKey:
        """The key. Raises NotFound, also for one out of reach."""
        return self._reached(get_key(self._connection, key_id))

    def keys(self, tenant_id: str | None, page: Page) -> tuple[list[ApiKey], bool]:
        """One page of a tenant's keys, or of all in reach, and whether there are more.

        Raises NotFound for a tenant out of reach, InvalidRequest for a bad cursor.
        """
        return list_keys(self._connection, self._owner(tenant_id), page)

    def change_key(self, key_id: str, name: str | None, resume_grace_s: int | None) -> ApiKey:
        """Another name or grace, where given. Raises NotFound."""
        before = self._locked_key(key_id)
        after = change_key(
            self._connection,
            key_id,
            before.name if name is None else name,
            before.resume_grace_s if resume_grace_s is None else resume_grace_s,
        )
        self._note("key.change", key_id, before.tenant_id, before, after)
        return after

    def rotate_key(
        self, pepper: bytes, key_id: str, grace_s: int, expires_at: datetime | None = None
    ) -> tuple[ApiKey, ApiKey, str]:
        """A new key that can do the same, and `grace_s` for the old one to be replaced in.

        Returns the old record, the new one, and the new key itself. Without an `expires_at` the new
        key ends when the old one would have. Raises NotFound, Conflict for a key that has ended or
        was rotated before, or PermissionDenied.
        """
        before = self._locked_key(key_id)
        self._check_is_current(before)
        wish = KeyWish(
            before.scopes, before.name, expires_at or before.expires_at, before.resume_grace_s
        )
        self._administrator.check_may_mint(self.tenant(before.tenant_id), wish)
        new, secret = create_key(self._connection, pepper, before.tenant_id, wish)
        self._note("key.create", new.key_id, new.tenant_id, None, new)
        old = replace_key(self._connection, key_id, new.key_id, grace_s)
        self._note("key.rotate", key_id, before.tenant_id, before, old)
        return old, new, secret

    def revoke_key(self, key_id: str) -> ApiKey:
        """Refuse the key from now on. Raises NotFound, or Conflict if it was revoked before."""
        before = self._locked_key(key_id)
        if not revoke_key(self._connection, key_id):
            raise Conflict(
                f"{key_id} has been revoked already, at {before.revoked_at:%Y-%m-%d %H:%M} UTC."
            )
        after = get_key(self._connection, key_id)
        self._note("key.revoke", key_id, before.tenant_id, before, after)
        return after

    def quotas(self, tenant_id: str, page: Page) -> tuple[list[Quota], bool]:
        """One page of a tenant's quotas. Raises NotFound, and InvalidRequest for a bad cursor."""
        return list_quotas(self._connection, self.tenant(tenant_id).tenant_id, page)

    def quota(self, tenant_id: str, model: str) -> Quota:
        """What is set for just this model. Raises NotFound."""
        found = find_quota(self._connection, self.tenant(tenant_id).tenant_id, model)
        if found is None:
            raise no_such_quota(model)
        return found

    def set_quota(self, tenant_id: str, model: str, limits: Limits) -> Quota:
        """Put limits in force. Raises NotFound for the tenant or the model."""
        self._administrator.check_is_operator()
        find_tenant(self._connection, tenant_id, for_update=True)
        before = find_quota(self._connection, tenant_id, model)
        after = set_quota(self._connection, tenant_id, model, limits)
        self._note("quota.set", model, tenant_id, before, after)
        return after

    def remove_quota(self, tenant_id: str, model: str) -> Quota:
        """Lift limits; returns those that there were. Raises NotFound."""
        self._administrator.check_is_operator()
        find_tenant(self._connection, tenant_id, for_update=True)
        before = find_quota(self._connection, tenant_id, model)
        if before is None:
            raise no_such_quota(model)
        remove_quota(self._connection, tenant_id, model)
        self._note("quota.remove", model, tenant_id, before, None)
        return before

    def audit(self, only: AuditFilter, page: Page) -> tuple[list[AuditRecord], bool]:
        """One page of the records in reach, newest first, and whether there are more.

        Raises NotFound for a tenant out of reach, InvalidRequest for a bad cursor.
        """
        only = replace(only, tenant_id=self._owner(only.tenant_id))
        return list_audit(self._connection, only, page)

    def _owner(self, tenant_id: str | None) -> str | None:
        """Whose things to list: those of a tenant in reach, or None for all there are."""
        if tenant_id is None:
            return self._administrator.only_tenant_id
        return self.tenant(tenant_id).tenant_id

    def _set_suspended(self, action: str, tenant_id: str, is_suspended: bool) -> Tenant:
        before = find_tenant(self._connection, tenant_id, for_update=True)
        after = set_suspended(self._connection, tenant_id, is_suspended)
        if before != after:
            self._note(action, tenant_id, tenant_id, before, after)
        return after

    def _reached(self, key: ApiKey) -> ApiKey:
        if not self._administrator.reaches(key.tenant_id):
            raise no_such_key(key.key_id)
        return key

    def _locked_key(self, key_id: str) -> ApiKey:
        self.key(key_id)  # Out of reach, nothing is locked.
        return get_key(self._connection, key_id, for_update=True)

    def _check_is_current(self, key: ApiKey) -> None:
        if key.revoked_at is not None:
            raise Conflict(f"{key.key_id} was revoked. Create a new key instead.")
        if key.replaced_by is not None:
            raise Conflict(f"{key.key_id} was rotated already. Rotate {key.replaced_by} instead.")
        if key.expires_at is not None and key.expires_at <= self.now():
            raise Conflict(f"{key.key_id} has expired. Create a new key instead.")

    def _note(
        self,
        action: str,
        object_id: str,
        tenant_id: str,
        before: Showable | None,
        after: Showable | None,
    ) -> None:
        shown = [None if each is None else each.as_object() for each in (before, after)]
        change = Change(action, object_id, tenant_id, *shown)
        record(self._connection, self._administrator, change)
