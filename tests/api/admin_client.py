"""Somebody with a key who administers through one gateway."""

import secrets

import httpx
from sqlalchemy import Engine

from control.identity.keys import KeyWish, create_key
from control.identity.tenants import create_tenant
from tests.api.live_gateway import PEPPER, LiveGateway


class Admin:
    """A tenant of its own with one key, and a client that asks with it."""

    def __init__(
        self, live: LiveGateway, database: Engine, *, is_operator: bool, scopes: str
    ) -> None:
        wish = KeyWish(frozenset(scopes.split()))
        with database.begin() as connection:
            name = f"admin-{secrets.token_hex(6)}"
            self.tenant_id = create_tenant(connection, name, is_operator=is_operator).tenant_id
            record, self.key = create_key(connection, PEPPER, self.tenant_id, wish)
        self.key_id = record.key_id
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{live.port}",
            headers={"authorization": f"Bearer {self.key}"},
            timeout=30,
        )

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Any request below /admin; a body is sent as JSON."""
        if body is None:
            return self.client.request(method, f"/admin/{path}")
        return self.client.request(method, f"/admin/{path}", json=body)

    def get(self, path: str, **query: str | int) -> httpx.Response:
        """Look at something."""
        return self.client.get(f"/admin/{path}", params=query)

    def post(self, path: str, body: object = None) -> httpx.Response:
        """Change something."""
        return self.ask("POST", path, body)

    def put(self, path: str, body: object) -> httpx.Response:
        """Put something in force."""
        return self.ask("PUT", path, body)

    def delete(self, path: str) -> httpx.Response:
        """Remove something."""
        return self.ask("DELETE", path)

    def new_key(self, **fields: object) -> dict[str, object]:
        """A key made over HTTP, the key itself included."""
        made = self.post("keys", {"scopes": ["inference"], **fields})
        assert made.status_code == 200, made.text
        key: dict[str, object] = made.json()
        return key
