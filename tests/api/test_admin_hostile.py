"""What no parameter, id or field of administration may do, whatever it holds."""

import json
import secrets
from collections.abc import Callable

import httpx
import pytest
from sqlalchemy import text

from control.database import connection as connections
from control.database.connection import connect_async
from control.identity.tenants import find_tenant
from tests.api.admin_client import Admin
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway

EVERY_SCOPE = ("inference", "batch", "usage", "admin")
UNKNOWN_KEY = "key_" + "0" * 24
HOSTILE = [
    "' OR '1'='1",
    "'; DROP TABLE tenants; --",
    "%",
    "_",
    "\\",
    '"',
    ":tenant_id",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 5000,
    "9" * 400,
    "",
]


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_no_parameter_of_any_list_is_more_than_a_value(
    operator: Admin, served: Served, live: LiveGateway, value: str
) -> None:
    """Quotes, wildcards, NUL and the like find nothing or are refused: never a fault of ours."""
    described = operator.client.get("/openapi.json").json()["paths"]
    _, key = served.new_key(*EVERY_SCOPE)
    asked = 0
    with httpx.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=30) as client:
        for path, methods in described.items():
            if "get" not in methods or path.startswith("/health/"):
                continue
            names = [p["name"] for p in methods["get"].get("parameters", ()) if p["in"] == "query"]
            bearer = operator.key if path.startswith("/admin/") else key
            for name in names:
                target = path.replace("{tenant_id}", served.tenant_id)
                raw = value.encode("utf-8", "surrogatepass")
                answer = client.get(
                    target,
                    params=f"{name}={''.join(f'%{byte:02x}' for byte in raw)}",
                    headers={"authorization": f"Bearer {bearer}"},
                )
                assert answer.status_code in (200, 400, 404), (path, name, answer.text)
                if answer.status_code == 200 and value not in ("",):
                    assert answer.json().get("data", []) == [], (path, name, answer.text)
                assert "sql" not in answer.text.lower()
                asked += 1
    assert asked >= 14
    with served.database.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM tenants")).scalar_one() > 0


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_no_id_and_no_field_of_administration_is_more_than_a_value(
    operator: Admin, value: str
) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in value.encode("utf-8", "surrogatepass")) or "%20"
    asked: list[tuple[str, str, object]] = [
        ("GET", f"tenants/{quoted}", None),
        ("POST", f"tenants/{quoted}", {"name": "x"}),
        ("POST", f"tenants/{quoted}/suspend", None),
        ("GET", f"tenants/{quoted}/quotas", None),
        ("PUT", f"tenants/{operator.tenant_id}/quotas/{quoted}", {"max_concurrent": 1}),
        ("DELETE", f"tenants/{operator.tenant_id}/quotas/{quoted}", None),
        ("GET", f"keys/{quoted}", None),
        ("POST", f"keys/{quoted}", {"name": "x"}),
        ("POST", f"keys/{quoted}/rotate", {"grace_s": 0}),
        ("POST", f"keys/{quoted}/revoke", None),
    ]
    for method, path, body in asked:
        answer = operator.ask(method, path, body)
        assert answer.status_code in (400, 404, 405), (method, path, answer.text)
    fields: list[tuple[str, object]] = [
        ("tenants", {"name": value}),
        ("keys", {"scopes": [value]}),
        ("keys", {"scopes": ["admin"], "tenant_id": value or "x"}),
        ("keys", {"scopes": ["admin"], "name": value}),
        ("keys", {"scopes": ["admin"], "expires_in_s": value}),
    ]
    for path, body in fields:
        answer = operator.client.post(
            f"/admin/{path}",
            content=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code in (200, 400, 404, 409), (path, body, answer.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("keys", {"scopes": []}),
        ("keys", {"scopes": ["admin"] * 9}),
        ("keys", {"scopes": "admin"}),
        ("keys", {"scopes": ["admin"], "expires_in_s": 0}),
        ("keys", {"scopes": ["admin"], "expires_in_s": 10**30}),
        ("keys", {"scopes": ["admin"], "expires_in_s": 1.5}),
        ("keys", {"scopes": ["admin"], "resume_grace_s": 61}),
        ("keys", {"scopes": ["admin"], "is_operator": True}),
        ("tenants", {"name": "x", "is_operator": True}),
        ("tenants", {"name": "x" * 201}),
        ("tenants", {}),
        ("tenants", []),
        (f"keys/{UNKNOWN_KEY}/rotate", {"grace_s": 10**9}),
        (f"keys/{UNKNOWN_KEY}/rotate", {"grace_s": -1}),
        (f"keys/{UNKNOWN_KEY}/rotate", {}),
    ],
)
def test_bad_bodies_are_refused_by_name(operator: Admin, path: str, body: object) -> None:
    answer = operator.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_failing_database_is_told_as_that_whatever_was_asked(
    start_gateway: Callable[..., LiveGateway], served: Served
) -> None:
    """No payload reaches a statement's text, and nothing of the database reaches the caller."""
    live = start_gateway()
    admin = Admin(live, served.database, is_operator=True, scopes="admin batch inference")
    with admin.client:
        assert admin.get("tenants").status_code == 200
        away = connect_async("postgresql://secret@127.0.0.1:1/secret", "test")
        database = live.gateway.database
        object.__setattr__(live.gateway, "database", away)
        for value in HOSTILE:
            quoted = "".join(f"%{byte:02x}" for byte in value.encode("utf-8", "surrogatepass"))
            key = value.encode("ascii", "replace").decode().replace("\0", "").replace("\n", "")
            asked = (
                admin.client.get(f"/admin/keys?tenant_id={quoted}"),
                admin.client.get(f"/admin/audit?actor_id={quoted}"),
                admin.client.get(f"/v1/files?after=file-{quoted}"),
                admin.client.get(f"/v1/files/{quoted or 'x'}"),
            )
            live.gateway.authenticator._database = away
            stranger = httpx.get(
                f"{live.url}/models", headers={"authorization": f"Bearer hr-{key}"}, timeout=30
            )
            for answer in (*asked, stranger):
                assert answer.status_code in (400, 401, 503), (value, answer.text)
                if answer.status_code == 503:
                    assert int(answer.headers["retry-after"]) >= 1
                for word in ("secret", "127.0.0.1", "psycopg", "select"):
                    assert word not in answer.text.lower()
        object.__setattr__(live.gateway, "database", database)


def test_a_change_that_cannot_have_its_lock_is_not_made_and_says_when_to_come_back(
    start_gateway: Callable[..., LiveGateway], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        connections, "SESSION_LIMITS", connections.SESSION_LIMITS.replace("=5000", "=200")
    )
    live = start_gateway()
    admin = Admin(live, served.database, is_operator=True, scopes="admin")
    with admin.client:
        tenant_id = admin.post("tenants", {"name": f"locked-{secrets.token_hex(4)}"}).json()["id"]
        with served.database.begin() as holder:
            find_tenant(holder, tenant_id, for_update=True)
            refused = admin.post(f"tenants/{tenant_id}/suspend")
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            # Others are looked at and changed meanwhile.
            assert admin.get(f"tenants/{tenant_id}").json()["suspended_at"] is None
        assert admin.post(f"tenants/{tenant_id}/suspend").status_code == 200
        told = admin.get("audit", object_id=tenant_id, action="tenant.suspend").json()["data"]
        assert len(told) == 1
