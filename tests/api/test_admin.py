"""Administration over HTTP: who may do what to whom, and that it takes hold everywhere."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from sqlalchemy import text

from control.database.connection import connect_async
from control.identity.keys import KeyWish, create_key
from tests.api.admin_client import Admin
from tests.api.conftest import Served
from tests.api.live_gateway import PEPPER, LiveGateway

EVERY_SCOPE = frozenset({"inference", "batch", "usage", "admin"})
HELD_S = 5.0  # what a gateway may still go by


def models(live: LiveGateway, key: object) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{live.url}/models", headers=headers, timeout=30).status_code


def test_a_tenant_and_its_key_are_made_and_the_key_speaks_through_the_sdk(
    operator: Admin, live: LiveGateway
) -> None:
    name = f"acme-{secrets.token_hex(4)}"
    tenant = operator.post("tenants", {"name": name}).json()
    assert tenant["name"] == name
    assert tenant["is_operator"] is False
    made = operator.post(
        "keys",
        {
            "tenant_id": tenant["id"],
            "scopes": ["inference", "batch"],
            "name": "laptop",
            "expires_in_s": 3600,
            "resume_grace_s": 15,
        },
    )
    assert made.headers["cache-control"] == "no-store"
    key = made.json()
    assert key["expires_at"] - key["created_at"] == 3600
    with openai.OpenAI(base_url=live.url, api_key=key["key"], max_retries=0) as client:
        assert client.models.list().data
    shown = operator.get(f"keys/{key['id']}").json()
    assert "key" not in shown
    assert {name: key[name] for name in shown if name != "last_used_at"} == {
        name: value for name, value in shown.items() if name != "last_used_at"
    }
    listed = operator.get("keys", tenant_id=tenant["id"]).json()
    assert [each["id"] for each in listed["data"]] == [key["id"]]
    assert key["key"] not in str(listed)
    found = operator.get("tenants", name=name).json()
    assert [each["id"] for each in found["data"]] == [tenant["id"]]


def test_a_rotated_key_and_its_successor_both_work_until_the_grace_is_over(
    operator: Admin,
    served: Served,
    live: LiveGateway,
    start_gateway: Callable[..., LiveGateway],
) -> None:
    old = operator.new_key(tenant_id=served.tenant_id)
    new = operator.post(f"keys/{old['id']}/rotate", {"grace_s": 3600}).json()
    assert new["replaces"]["replaced_by"] == new["id"]
    assert [models(live, key) for key in (old["key"], new["key"])] == [200, 200]
    restarted = start_gateway()
    assert [models(restarted, key) for key in (old["key"], new["key"])] == [200, 200]
    with served.database.begin() as connection:
        connection.execute(
            text("UPDATE api_keys SET expires_at = now() WHERE key_id = :id"), {"id": old["id"]}
        )
    another = start_gateway()
    assert [models(another, key) for key in (old["key"], new["key"])] == [401, 200]


def test_a_revoked_key_is_refused_by_every_gateway_within_five_seconds(
    operator: Admin, served: Served, start_gateway: Callable[..., LiveGateway]
) -> None:
    """Also by one whose database has gone: it says 503 then, and never yes."""
    key = operator.new_key(tenant_id=served.tenant_id)
    gateways = [start_gateway(), start_gateway(), start_gateway()]
    assert [models(each, key["key"]) for each in gateways] == [200, 200, 200]
    _without_database(gateways[2])
    assert operator.post(f"keys/{key['id']}/revoke").json()["revoked_at"] is not None
    for each in gateways:
        _let_pass(each, HELD_S)
    assert [models(each, key["key"]) for each in gateways] == [401, 401, 503]


def _without_database(live: LiveGateway) -> None:
    live.gateway.authenticator._database = connect_async("postgresql://x@127.0.0.1:1/x", "test")


def _let_pass(live: LiveGateway, seconds: float) -> None:
    """For the gateway's keys it is so much later from now on."""
    authenticator = live.gateway.authenticator
    monotonic = authenticator._monotonic
    authenticator._monotonic = lambda: monotonic() + seconds


def test_what_a_revoked_key_still_may_elsewhere_it_may_not_here(operator: Admin) -> None:
    """Somebody who stole a key mints no other in the seconds that gateways remember it."""
    assert operator.get("tenants").status_code == 200
    assert operator.post(f"keys/{operator.key_id}/revoke").status_code == 200
    assert operator.get("tenants").status_code == 401
    assert operator.post("keys", {"scopes": ["admin"]}).status_code == 401


def test_nothing_is_minted_beside_a_revocation(operator: Admin, customer: Admin) -> None:
    """Whatever is minted at the same moment is either there when the revocation is done, or never
    comes.
    """
    with ThreadPoolExecutor(5) as pool:
        minting = [pool.submit(customer.post, "keys", {"scopes": ["admin"]}) for _ in range(8)]
        assert operator.post(f"keys/{customer.key_id}/revoke").status_code == 200
        then = operator.get("keys", tenant_id=customer.tenant_id).json()["data"]
        statuses = sorted(each.result().status_code for each in minting)
    after = operator.get("keys", tenant_id=customer.tenant_id).json()["data"]
    assert [key["id"] for key in then] == [key["id"] for key in after]
    assert len(after) == 1 + statuses.count(200)
    assert set(statuses) <= {200, 401}


@pytest.mark.parametrize("scopes", ["inference", "batch", "usage", "inference batch usage"])
def test_without_the_scope_nobody_administers(
    live: LiveGateway, served: Served, scopes: str
) -> None:
    admin = Admin(live, served.database, is_operator=True, scopes=scopes)
    with admin.client:
        for answer in (
            admin.get("tenants"),
            admin.get("audit"),
            admin.post("tenants", {"name": "x"}),
            admin.post(f"keys/{admin.key_id}/rotate", {"grace_s": 0}),
        ):
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "permission_denied"


def test_a_tenants_administrator_administers_its_own_keys_and_nothing_else(
    customer: Admin, operator: Admin, served: Served
) -> None:
    own = customer.new_key(scopes=["inference"])
    assert own["tenant_id"] == customer.tenant_id
    assert customer.post(f"keys/{own['id']}", {"name": "renamed"}).json()["name"] == "renamed"
    assert [t["id"] for t in customer.get("tenants").json()["data"]] == [customer.tenant_id]
    ids = {key["id"] for key in customer.get("keys").json()["data"]}
    assert ids == {customer.key_id, own["id"]}
    owners = {record["tenant_id"] for record in customer.get("audit").json()["data"]}
    assert owners == {customer.tenant_id}
    for path in ("tenants", f"tenants/{customer.tenant_id}", f"tenants/{served.tenant_id}"):
        assert customer.post(path, {"name": "x"}).status_code == 403
    for act in ("suspend", "resume"):
        assert customer.post(f"tenants/{customer.tenant_id}/{act}").status_code == 403
    quota = customer.put(f"tenants/{customer.tenant_id}/quotas/*", {"max_concurrent": 1000})
    assert quota.status_code == 403
    assert customer.post(f"keys/{own['id']}/revoke").status_code == 200


@pytest.mark.parametrize(
    ("scopes", "wish"),
    [
        ("admin", {"scopes": ["inference"]}),
        ("admin batch", {"scopes": ["admin", "usage"]}),
    ],
)
def test_no_key_mints_a_wider_one(
    live: LiveGateway, served: Served, scopes: str, wish: dict[str, object]
) -> None:
    for is_operator in (False, True):
        admin = Admin(live, served.database, is_operator=is_operator, scopes=scopes)
        with admin.client:
            refused = admin.post("keys", wish)
            assert refused.status_code == 403
            assert refused.json()["error"]["param"] == "scopes"
            # Nor by rotating one that is.
            with served.database.begin() as connection:
                wider, _ = create_key(connection, PEPPER, admin.tenant_id, KeyWish(EVERY_SCOPE))
            assert admin.post(f"keys/{wider.key_id}/rotate", {"grace_s": 0}).status_code == 403


def test_a_suspended_tenant_is_refused_and_taken_back(operator: Admin, customer: Admin) -> None:
    assert customer.get("keys").status_code == 200
    path = f"tenants/{customer.tenant_id}"
    assert operator.post(f"{path}/suspend").json()["suspended_at"] is not None
    assert customer.get("keys").status_code == 401  # remembered here, and confirmed in vain
    assert operator.post(f"{path}/resume").json()["suspended_at"] is None
    assert customer.get("keys").status_code == 200
    refused = operator.post(f"tenants/{operator.tenant_id}/suspend")
    assert refused.status_code == 409


def test_quotas_are_set_shown_listed_and_lifted(
    operator: Admin, customer: Admin, served: Served
) -> None:
    base = f"tenants/{customer.tenant_id}/quotas"
    limits = {"tokens_per_minute": 10_000, "requests_per_minute": 60, "max_enqueued_tokens": 10**12}
    assert operator.put(f"{base}/*", {"max_concurrent": 4}).status_code == 200
    made = operator.put(f"{base}/{served.model}", limits).json()
    assert {name: made[name] for name in limits} == limits
    assert made["max_concurrent"] is None
    assert customer.get(f"tenants/{customer.tenant_id}/quotas/{served.model}").json() == made
    page = customer.get(f"tenants/{customer.tenant_id}/quotas", limit=1).json()
    assert (page["last_id"], page["has_more"]) == ("*", True)
    rest = customer.get(f"tenants/{customer.tenant_id}/quotas", after="*").json()
    assert [each["model"] for each in rest["data"]] == [served.model]
    assert operator.put(f"{base}/*", {}).status_code == 400
    assert operator.put(f"{base}/unheard-of", limits).status_code == 404
    of_one = operator.put(f"{base}/{served.model}", {"max_concurrent": 4})
    assert of_one.json()["error"]["param"] == "max_concurrent"
    assert operator.delete(f"{base}/*").json()["deleted"] is True
    assert operator.delete(f"{base}/*").status_code == 404
    told = customer.get("audit", object_id=served.model).json()["data"]
    assert told[0]["after"]["tokens_per_minute"] == 10_000


def test_a_change_is_on_record_with_the_key_and_the_request(operator: Admin) -> None:
    made = operator.post("tenants", {"name": f"recorded-{secrets.token_hex(4)}"})
    (record,) = operator.get("audit", object_id=made.json()["id"]).json()["data"]
    assert record["actor"] == {"type": "key", "id": operator.key_id}
    assert record["action"] == "tenant.create"
    assert record["request_id"] == made.headers["x-request-id"]
    assert (record["before"], record["after"]) == (None, made.json())
    refused = operator.post("tenants", {"name": made.json()["name"]})
    assert refused.status_code == 409
    assert len(operator.get("audit", object_id=made.json()["id"]).json()["data"]) == 1


def test_the_description_knows_every_administering_route(operator: Admin) -> None:
    described = operator.client.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if path.startswith("/admin/") and method in ("post", "put"):
                has_body = not path.endswith(("/suspend", "/resume", "/revoke"))
                assert ("requestBody" in operation) == has_body, path
            if path.startswith("/admin/"):
                assert operation["security"] == [{"key": []}]
    scopes = described["components"]["schemas"]["NewKey"]["properties"]["scopes"]
    assert set(scopes["items"]["enum"]) == EVERY_SCOPE
