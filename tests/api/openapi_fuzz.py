"""Requests of all kinds, made from /openapi.json: whatever is asked, nothing answers with a 5xx.

Half of the cases follow the description and half break it somewhere. To get further than "no such
model", most bodies of generations name a model that is served and want few words.

    python -m tests.api.openapi_fuzz --cases 2000      starts a service and asks it everything
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation

from benchmarks.service_process import running_service
from cli.data_dir import DEFAULT_DATA_DIR
from cli.demo_access import DEMO_FILE
from cli.env_file import read_env_file
from cli.settings import ADMIN_KEY
from workers.demo_model import fetch_demo_model

Statuses = dict[str, Counter[int]]

# Bodies that are left as they came: one in so many.
LEFT_ALONE = 8
FEW_TOKENS = 3
CASE_LIMIT_S = 60.0


class OpenAPIFuzz:
    """Asks one service for one of its models, or for the first that it lists.

    `key` must have every scope but `admin`, which `admin_key` has.
    """

    def __init__(self, base_url: str, key: str, admin_key: str, model: str | None = None) -> None:
        self._base_url = base_url
        self._admin_headers = {"Authorization": f"Bearer {admin_key}"}
        self._headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=base_url, headers=self._headers, timeout=CASE_LIMIT_S)
        self._session = requests.Session()
        self._schema = schemathesis.openapi.from_dict(self._json("GET", "/openapi.json"))
        self._model = model or self._json("GET", "/v1/models")["data"][0]["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._session.close()

    def _json(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        headers = self._headers_for(path)
        answer = self._client.request(method, path, headers=headers, **content)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def run(self, num_cases: int, random_seed: int = 0) -> Iterator[tuple[str, Counter[int]]]:
        """So many cases for each operation: its name and the statuses that it answered with.

        Raises AssertionError, with the request as a curl command, at a 5xx.
        """
        for found in self._schema.get_all_operations():
            assert isinstance(found, Ok), f"badly described: {found.err()}"
            operation = found.ok()
            yield operation.label, self._ask(operation, num_cases, random_seed)

    def _ask(
        self, operation: APIOperation[Any, Any, Any, Any], num_cases: int, random_seed: int
    ) -> Counter[int]:
        statuses: Counter[int] = Counter()
        has_input = bool(operation.body) or any(True for _ in operation.iter_parameters())
        modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * has_input
        for mode in modes:
            strategy = st.tuples(operation.as_strategy(mode), st.randoms(use_true_random=False))

            @seed(random_seed)
            @settings(
                max_examples=num_cases // len(modes),
                phases=[Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def ask(drawn: tuple[Case[Any], Any]) -> None:
                case, random = drawn
                if random.randrange(LEFT_ALONE):
                    self._bring_further(case)
                status = self._status_of(case)
                statuses[status] += 1

            ask()
            # What can be varied little is asked again as it is.
            while not has_input and statuses.total() < num_cases:
                statuses[self._status_of(operation.Case())] += 1
        return statuses

    def _status_of(self, case: Case[Any]) -> int:
        headers = self._headers_for(case.path)
        answer = case.call(
            self._base_url, session=self._session, headers=headers, timeout=CASE_LIMIT_S
        )
        command = case.as_curl_command(headers=headers)
        assert answer.status_code < 500, f"{answer.status_code}: {answer.text} to {command}"
        return int(answer.status_code)

    def _headers_for(self, path: str) -> dict[str, str]:
        return self._admin_headers if path.startswith("/admin/") else self._headers

    def _bring_further(self, case: Case[Any]) -> None:
        """Name things that there are, and want few words."""
        body, path = case.body, case.path_parameters
        if isinstance(body, dict) and ("messages" in body or "prompt" in body):
            body["model"] = self._model
            names = [name for name in ("max_tokens", "max_completion_tokens") if name in body]
            for name in names or ["max_tokens"]:
                wanted = body.get(name)
                if wanted is None or (isinstance(wanted, int) and wanted > FEW_TOKENS):
                    body[name] = FEW_TOKENS
        elif isinstance(body, dict) and "input_file_id" in body:
            body["input_file_id"] = self._new_file()
        made: dict[str, Callable[[], str]] = {
            "name": lambda: self._model,
            "model": lambda: "*",
            "file_id": self._new_file,
            "batch_id": self._new_batch,
            "key_id": lambda: self._new("keys", {"scopes": ["admin"]}),
            "tenant_id": lambda: self._new("tenants", {"name": secrets.token_hex(8)}),
        }
        path.update({name: make() for name, make in made.items() if name in path})

    def _new(self, kind: str, wish: dict[str, Any]) -> str:
        return str(self._json("POST", f"/admin/{kind}", json=wish)["id"])

    def _new_file(self) -> str:
        line: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": self._model, "prompt": "Once", "max_tokens": 1}
        file = self._json(
            "POST",
            "/v1/files",
            files={"file": ("lines.jsonl", json.dumps(line).encode())},
            data={"purpose": "batch"},
        )
        return str(file["id"])

    def _new_batch(self) -> str:
        wish = {"endpoint": "/v1/completions", "completion_window": "24h"}
        return str(
            self._json("POST", "/v1/batches", json=wish | {"input_file_id": self._new_file()})["id"]
        )


def main() -> None:
    """Ask a service of one's own everything, and say how it answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="cases for each operation")
    parser.add_argument("--model", help="a folder, or scripted; without it: the demo model")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    model = asked.model or str(fetch_demo_model(DEFAULT_DATA_DIR / "weights", print))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "data", model) as service,
        OpenAPIFuzz(
            f"http://{service.host}:{service.port}",
            service.api_key,
            read_env_file(Path(folder) / "data" / DEMO_FILE)[ADMIN_KEY],
        ) as fuzz,
    ):
        started = time.monotonic()
        for label, statuses in fuzz.run(asked.cases, asked.seed):
            told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
            sys.stdout.write(f"{label:40} {told}  ({time.monotonic() - started:.0f} s)\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
