"""No id of another tenant is told from one that never was, wherever an id can be written.

The routes are read from the description of the API: whatever is added there is tried here, or the
test says what it must be told of the new parameter.
"""

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
from sqlalchemy import event

from control.identity.request_id import ALPHABET
from tests.api.admin_client import Admin
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import ScriptedReplica

# Which kind of id a path parameter, a field of a body, or a query parameter takes. None: no id, or
# one that is no secret, such as a model's name.
PATH_IDS: dict[str, str | None] = {
    "file_id": "file",
    "batch_id": "batch",
    "completion_id": "completion",
    "tenant_id": "tenant",
    "key_id": "key",
    "model": None,
    "name": None,
}
QUERY_IDS: dict[str, str | None] = {
    "tenant_id": "tenant",
    "actor_id": "actor",
    "object_id": "key",
    "limit": None,
    "order": None,
    "purpose": None,
    "starting_after": None,
    "name": None,
    "action": None,
}
CURSORS = {
    "/v1/files": "file",
    "/v1/batches": "batch",
    "/admin/tenants": "tenant",
    "/admin/keys": "key",
    "/admin/audit": "record",
    "/admin/tenants/{tenant_id}/quotas": "quota",
}
BODY_IDS = {
    "input_file_id": "file",
    "tenant_id": "tenant",
}
# What else a request must hold for its id to be looked at.
BODIES: dict[tuple[str, str], dict[str, object]] = {
    ("post", "/v1/batches"): {"endpoint": "/v1/completions", "completion_window": "24h"},
    ("post", "/admin/tenants/{tenant_id}"): {"name": "renamed"},
    ("put", "/admin/tenants/{tenant_id}/quotas/{model}"): {"max_concurrent": 1},
    ("post", "/admin/keys"): {"scopes": ["inference"]},
    ("post", "/admin/keys/{key_id}"): {"name": "renamed"},
    ("post", "/admin/keys/{key_id}/rotate"): {"grace_s": 60},
}
# Routes that take no id: nothing of them is tried.
WITHOUT_IDS = {
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/files"),
    ("post", "/admin/tenants"),
}

UNKNOWN: dict[str, Callable[[], str]] = {
    "file": lambda: "file-" + _letters(26),
    "batch": lambda: "batch_" + _letters(26),
    "completion": lambda: "cmpl-" + _letters(26),
    "chat": lambda: "chatcmpl-" + _letters(26),
    "tenant": lambda: "tnt_" + secrets.token_hex(12),
    "key": lambda: "key_" + secrets.token_hex(12),
    "actor": lambda: "key_" + secrets.token_hex(12),
    "record": lambda: str(10**15 + secrets.randbelow(10**15)),
    "quota": lambda: "model-" + secrets.token_hex(6),
}
PASSING = {"date", "x-request-id", "openai-processing-ms", "content-length"}
NUM_TIMED = 5
SAME_TIME_S = 0.02


def _letters(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere in a request where an id can be written."""

    method: str
    path: str
    where: str
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.method.upper()} {self.path} {self.where}:{self.name}"


class Tenant:
    """A tenant with things of its own, made over HTTP."""

    def __init__(self, admin: Admin, operator: Admin, served: Served) -> None:
        self.admin, self._operator, self._model = admin, operator, served.model
        self.client = admin.client

    def make(self, kind: str) -> str:
        """The id of something new of this tenant."""
        return cast("str", getattr(self, f"_new_{kind}")())

    def _new_file(self) -> str:
        answer = self.client.post(
            "/v1/files", files={"file": ("a.jsonl", b"{}\n")}, data={"purpose": "batch"}
        )
        return str(answer.raise_for_status().json()["id"])

    def _new_batch(self) -> str:
        body = BODIES["post", "/v1/batches"] | {"input_file_id": self._new_file()}
        return str(self.client.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def _new_completion(self) -> str:
        body = {"model": self._model, "prompt": "Once", "max_tokens": 4}
        return str(self.client.post("/v1/completions", json=body).raise_for_status().json()["id"])

    def _new_chat(self) -> str:
        body = {"model": self._model, "messages": [{"role": "user", "content": "Hi"}]}
        answer = self.client.post("/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["id"])

    def _new_tenant(self) -> str:
        made = self._operator.post("tenants", {"name": f"isolated-{secrets.token_hex(6)}"})
        tenant_id = str(made.json()["id"])
        self._operator.put(f"tenants/{tenant_id}/quotas/*", {"max_concurrent": 1})
        return tenant_id

    def _new_key(self) -> str:
        return str(self.admin.new_key()["id"])

    def _new_actor(self) -> str:
        self._new_key()
        return self.admin.key_id

    def _new_record(self) -> str:
        key_id = self._new_key()
        return str(self.admin.get("audit", object_id=key_id).json()["data"][0]["id"])

    def _new_quota(self) -> str:
        path = f"tenants/{self.admin.tenant_id}/quotas/{self._model}"
        self._operator.put(path, {"tokens_per_minute": 1}).raise_for_status()
        return self._model


@pytest.fixture
def tenants(
    live: LiveGateway, served: Served, operator: Admin, replica: ScriptedReplica
) -> Iterator[tuple[Tenant, Tenant]]:
    del replica
    scopes = "inference batch usage admin"
    one, other = (Admin(live, served.database, is_operator=False, scopes=scopes) for _ in range(2))
    with one.client, other.client:
        yield Tenant(one, operator, served), Tenant(other, operator, served)


def test_what_another_tenant_has_is_answered_like_what_nobody_has(
    live: LiveGateway, operator: Admin, tenants: tuple[Tenant, Tenant]
) -> None:
    """Byte for byte, and by the same statements in the database, for every kind of id."""
    owner, stranger = tenants
    described = operator.client.get("/openapi.json").json()
    theirs = {kind: owner.make(kind) for kind in UNKNOWN}
    found = list(places(described))
    assert {place.kind for place in found} >= set(UNKNOWN)
    for place in found:
        for kind, taken in theirs.items():
            nobodys = UNKNOWN[kind]()
            with statements(live) as of_theirs:
                known = ask(place, stranger, taken)
            with statements(live) as of_nobodys:
                unknown = ask(place, stranger, nobodys)
            context = f"{place} with a {kind}: {known.status_code} {known.text}"
            assert known.status_code == unknown.status_code, context
            assert known.content.replace(taken.encode(), b"ID") == unknown.content.replace(
                nobodys.encode(), b"ID"
            ), context
            assert shown_headers(known) == shown_headers(unknown), context
            assert of_theirs == of_nobodys, context
            assert is_nothing(known), context


def test_what_is_ones_own_is_answered(operator: Admin, tenants: tuple[Tenant, Tenant]) -> None:
    """The control of the claim above: the same requests succeed for whom it belongs to."""
    owner, stranger = tenants
    described = operator.client.get("/openapi.json").json()
    for place in places(described):
        own = owner.make(place.kind)
        # Some of what is asked under /admin is an operator's alone.
        asker = operator.client if place.path.startswith("/admin/") else owner.client
        answer = ask(place, owner, own, asker)
        context = f"{place}: {answer.status_code} {answer.text}"
        assert answer.is_success, context
        refused = ask(place, stranger, own)
        assert answer.content != refused.content, context


def test_the_time_of_an_answer_does_not_tell_them_apart(
    operator: Admin, tenants: tuple[Tenant, Tenant]
) -> None:
    owner, stranger = tenants
    described = operator.client.get("/openapi.json").json()
    for place in places(described):
        taken, nobodys = owner.make(place.kind), UNKNOWN[place.kind]()
        taken_s: list[float] = []
        nobodys_s: list[float] = []
        for _ in range(NUM_TIMED):
            for wanted, times in ((taken, taken_s), (nobodys, nobodys_s)):
                started = time.perf_counter()
                ask(place, stranger, wanted)
                times.append(time.perf_counter() - started)
        apart_s = abs(statistics.median(taken_s) - statistics.median(nobodys_s))
        assert apart_s < max(SAME_TIME_S, statistics.median(nobodys_s)), f"{place}: {apart_s}"


def places(described: dict[str, Any]) -> Iterator[Place]:
    """Every place for an id in the description. Fails for a parameter that nobody has classed."""
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            found = list(_places_of(method, path, operation, schemas))
            yield from found
            is_classed = found or not operation.get("requestBody")
            assert is_classed or (method, path) in WITHOUT_IDS, f"say of what {path} takes no id"


def _places_of(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> Iterator[Place]:
    for parameter in operation.get("parameters", ()):
        name, where = parameter["name"], parameter["in"]
        if where == "query" and name == "after":
            assert path in CURSORS, f"say in CURSORS what the cursor of {path} is"
            kind: str | None = CURSORS[path]
        else:
            known = PATH_IDS if where == "path" else QUERY_IDS
            assert name in known, f"say what {where} parameter {name!r} of {path} takes"
            kind = known[name]
        if kind == "completion" and path.startswith("/v1/chat/"):
            kind = "chat"
        if kind is not None:
            yield Place(method, path, where, name, kind)
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    properties = schemas.get(reference.rpartition("/")[2], {}).get("properties", {})
    for name in properties:
        if name.endswith(("_id", "_ids")) and not name.endswith("token_ids"):
            assert name in BODY_IDS, f"say in BODY_IDS what the field {name!r} of {path} takes"
            yield Place(method, path, "body", name, BODY_IDS[name])


def ask(
    place: Place, tenant: Tenant, wanted: str, client: httpx.Client | None = None
) -> httpx.Response:
    """The request with the wanted id at its place, and the tenant's own everywhere else."""
    path = place.path
    if place.where == "path":
        path = path.replace(f"{{{place.name}}}", wanted)
    path = path.replace("{tenant_id}", tenant.admin.tenant_id).replace("{model}", "*")
    assert "{" not in path, f"{place}: say what stands for the other ids of the path"
    query = {place.name: wanted} if place.where == "query" else {}
    body = BODIES.get((place.method, place.path))
    if place.where == "body":
        assert body is not None, f"say in BODIES what else {place.path} takes"
        body = body | {place.name: wanted}
    client = client or tenant.client
    if body is None:
        return client.request(place.method, path, params=query)
    return client.request(place.method, path, params=query, json=body)


def shown_headers(answer: httpx.Response) -> list[tuple[str, str]]:
    """The headers that could tell something."""
    return [(name, value) for name, value in answer.headers.items() if name not in PASSING]


def is_nothing(answer: httpx.Response) -> bool:
    """True of a refusal, and of a list that is empty."""
    return answer.is_client_error or answer.json()["data"] == []


@contextmanager
def statements(live: LiveGateway) -> Iterator[list[str]]:
    """The statements that the gateway gives the database meanwhile; keys' own uses aside."""
    heard: list[str] = []

    def hear(*arguments: Any) -> None:
        if "api_keys k JOIN" not in arguments[2] and "last_used_at = now()" not in arguments[2]:
            heard.append(arguments[2])

    engine = live.gateway.database.sync_engine
    event.listen(engine, "before_cursor_execute", hear)
    try:
        yield heard
    finally:
        event.remove(engine, "before_cursor_execute", hear)
