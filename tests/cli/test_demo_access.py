"""The demo tenant's keys, and administration from the command line, on a real database."""

import stat
import subprocess
from pathlib import Path

from cli.demo_access import DEMO_FILE, DemoAccess, grant_demo_access
from cli.env_file import read_env_file, write_env_file
from cli.processes import headrace
from control.database.connection import connect, connect_async
from control.identity.keys import create_key, find_key, hash_key, list_keys, revoke_key
from control.identity.tenants import create_tenant

PEPPER = bytes(range(32))
ROOT = Path(__file__).resolve().parents[2]


async def grant(database_url: str, data_dir: Path, port: int) -> DemoAccess:
    engine = connect_async(database_url, "test", pool_size=1)
    try:
        async with engine.connect() as connection:
            origin = f"http://127.0.0.1:{port}/v1"
            return await grant_demo_access(connection, PEPPER, data_dir, origin)
    finally:
        await engine.dispose()


async def test_a_second_start_reuses_the_keys_and_refreshes_the_url(
    fresh_database_url: str, tmp_path: Path
) -> None:
    first = await grant(fresh_database_url, tmp_path, 8000)
    second = await grant(fresh_database_url, tmp_path, 9000)

    assert (second.api_key, second.admin_key) == (first.api_key, first.admin_key)
    assert first.api_key != first.admin_key
    assert read_env_file(tmp_path / DEMO_FILE) == {
        "HEADRACE_BASE_URL": "http://127.0.0.1:9000/v1",
        "HEADRACE_API_KEY": first.api_key,
        "HEADRACE_ADMIN_KEY": first.admin_key,
    }
    assert stat.S_IMODE((tmp_path / DEMO_FILE).stat().st_mode) == 0o600


async def test_a_key_that_is_no_longer_valid_is_minted_anew_and_the_other_kept(
    fresh_database_url: str, tmp_path: Path
) -> None:
    first = await grant(fresh_database_url, tmp_path, 8000)
    engine = connect(fresh_database_url, "test", pool_size=1)
    with engine.begin() as connection:
        (inference,) = (key for key in list_keys(connection)[0] if "inference" in key.scopes)
        assert revoke_key(connection, inference.key_id)
    engine.dispose()

    second = await grant(fresh_database_url, tmp_path, 8000)

    assert second.api_key != first.api_key
    assert second.admin_key == first.admin_key


async def test_the_administrators_key_is_an_operators(
    fresh_database_url: str, tmp_path: Path
) -> None:
    """One that an older version made for the demo tenant is replaced."""
    engine = connect(fresh_database_url, "test", pool_size=1)
    with engine.begin() as connection:
        demo = create_tenant(connection, "demo")
        _, old = create_key(connection, PEPPER, demo.tenant_id, frozenset({"admin"}))
    write_env_file(tmp_path / DEMO_FILE, {"HEADRACE_ADMIN_KEY": old})

    access = await grant(fresh_database_url, tmp_path, 8000)

    assert access.admin_key != old
    database = connect_async(fresh_database_url, "test")
    async with database.connect() as reader:
        keys = [
            await find_key(reader, hash_key(PEPPER, key))
            for key in (access.admin_key, access.api_key)
        ]
    assert [key is not None and key.is_operator for key in keys] == [True, False]
    await database.dispose()
    engine.dispose()


def test_tenants_and_keys_are_made_listed_and_revoked(
    fresh_database_url: str, tmp_path: Path
) -> None:
    def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*headrace("admin", *arguments), "--data-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env={
                "DATABASE_URL": fresh_database_url,
                "HEADRACE_KEY_PEPPER": PEPPER.hex(),
                "PYTHONPATH": str(ROOT),
            },
        )

    tenant_id = admin("tenant", "create", "acme").stdout.strip()
    other_id = admin("tenant", "create", "other").stdout.strip()
    header, *tenants = rows(admin("tenant", "list"))
    assert header == ["tenant", "name", "created (UTC)", "role", "suspended (UTC)"]
    assert [tenant[:2] for tenant in tenants] == [[tenant_id, "acme"], [other_id, "other"]]
    taken = admin("tenant", "create", "acme")
    assert taken.returncode == 1
    assert "acme" in taken.stderr
    assert "Traceback" not in taken.stderr

    secret = admin("key", "create", tenant_id, "--scope", "batch", "--scope", "usage").stdout
    assert secret.startswith("hr-")
    assert secret.count("\n") == 1
    assert admin("key", "create", "other").returncode == 0
    for tenant in ("acme", tenant_id):
        listed = admin("key", "list", "--tenant", tenant)
        header, (key_id, owner, _, scopes, _, revoked, *_) = rows(listed)
        assert header[:2] == ["key", "tenant"]
        assert (owner, scopes, revoked) == (tenant_id, "batch, usage", "")
        assert secret.strip() not in listed.stdout
    ((_, _, _, scopes, *_),) = rows(admin("key", "list", "--tenant", "other"))[1:]
    assert scopes == "batch, inference, usage"

    unasked = admin("key", "revoke", key_id)
    assert unasked.returncode == 1
    assert "Add --yes" in unasked.stderr
    assert admin("key", "revoke", key_id, "--yes").returncode == 0
    again = admin("key", "revoke", key_id)
    assert again.returncode == 1
    assert f"{key_id} has been revoked already, at 20" in again.stderr
    unheard_of = admin("key", "revoke", "key_0")
    assert unheard_of.returncode == 1
    assert "There is no key key_0. `headrace admin key list` shows them all." in unheard_of.stderr
    for command in (("key", "create", "nobody"), ("key", "list", "--tenant", "nobody")):
        nobody = admin(*command)
        assert nobody.returncode == 1
        assert "There is no tenant 'nobody'" in nobody.stderr
        assert "headrace admin tenant list" in nobody.stderr
    unknown = admin("key", "create", tenant_id, "--scope", "everything")
    assert unknown.returncode == 2
    assert "everything" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def rows(said: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [line.split("\t") for line in said.stdout.splitlines()]
