"""The main job on real parts: the official SDK, real processes, and what is left in the ledger.

The model is the scripted one, which says its prompt back, so every expected token is known.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from benchmarks.service_process import running_service
from headrace.client import Headrace
from tests.end_to_end.live_service import LiveService, until
from tests.end_to_end.traces import Traces

STEP_MS = 15


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One service for the module; a step takes long enough to be interrupted."""
    data_dir = tmp_path_factory.mktemp("serve")
    settings = {"HEADRACE_SCRIPTED_DELAY_MS": str(STEP_MS)}
    with running_service(data_dir, "scripted", settings) as process:
        yield LiveService(process, data_dir, "scripted")


def say(client: openai.OpenAI, prompt: str, max_tokens: int = 400) -> str:
    """The streamed answer to a raw prompt, to the end of its stream."""
    stream = client.completions.create(
        model="scripted", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_sixteen_streams_and_one_hangs_up(service: LiveService) -> None:
    client = service.client()
    free_before = service.snapshots()[0].kv_blocks_free
    prompts = [f"stream {number:02} says these words again. " * 3 for number in range(15)]
    broken = client.completions.create(
        model="scripted", prompt="x" * 390, max_tokens=400, temperature=0, stream=True
    )
    with ThreadPoolExecutor(15) as pool:
        answers = [pool.submit(say, client, prompt) for prompt in prompts]
        seen = 0
        request_id = ""
        for chunk in broken:
            request_id = chunk.id.removeprefix("cmpl-")
            seen += len(chunk.choices[0].text)
            if seen >= 20:
                break
        broken.close()
        assert [answer.result() for answer in answers] == prompts
    query = (
        "SELECT outcome, completion_tokens, wasted_tokens FROM usage_events WHERE request_id = %s"
    )
    until(lambda: bool(service.sql(query, request_id)), 10)
    ((outcome, completion, wasted),) = service.sql(query, request_id)
    assert outcome == "cancelled"
    assert isinstance(completion, int)
    assert seen <= completion < 200
    assert wasted == 0
    until(lambda: service.snapshots()[0].kv_blocks_free == free_before, 5)


def test_a_second_after_its_caller_left_a_requests_usage_is_known(service: LiveService) -> None:
    client = service.client()
    for num_read in (1, 7, 30):
        stream = client.completions.create(
            model="scripted", prompt="y" * 390, max_tokens=400, temperature=0, stream=True
        )
        chunks = [next(stream) for _ in range(num_read)]
        completion_id = chunks[-1].id
        stream.close()
        left_at = time.monotonic()
        status: dict[str, Any] = {}
        while status.get("status") != "cancelled":
            assert time.monotonic() - left_at < 1.0, status
            status = client.get(f"/completions/{completion_id}", cast_to=dict[str, Any])
        query = "SELECT completion_tokens FROM usage_events WHERE request_id = %s"
        ((billed,),) = service.sql(query, completion_id.removeprefix("cmpl-"))
        assert status["usage"]["completion_tokens"] == billed
        logged = client.get(f"/completions/{completion_id}/stream", cast_to=httpx2.Response)
        assert logged.text.count('"text":"y"') == billed


def test_a_stream_outlives_its_gateway_and_its_replica(service: LiveService) -> None:
    helper = Headrace(service.client())
    prompt = "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(300))
    said = ""
    for chunk in helper.completions.stream(
        model="scripted", prompt=prompt, max_tokens=300, temperature=0
    ):
        before, said = len(said), said + chunk.choices[0].text
        for process, place in (("gateway", 60), ("replica", 150)):
            if before < place <= len(said):
                pid = service.pid_of(process)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
    assert said == prompt
    until(lambda: service.pid_of("replica") is not None, 20)


def test_a_batch_of_five_lines(service: LiveService, tmp_path: Path) -> None:
    client = service.client()
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "scripted", "prompt": f"answer {number}", "max_tokens": 30},
        }
        for number in range(5)
    ]
    source = tmp_path / "five.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    uploaded = client.files.create(file=source, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", 90)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
    assert batch.error_file_id is None
    assert batch.output_file_id is not None
    results = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert [result["custom_id"] for result in results] == [f"line-{n}" for n in range(5)]
    bodies = [result["response"]["body"] for result in results]
    assert [body["choices"][0]["text"] for body in bodies] == [f"answer {n}" for n in range(5)]
    ((rows, prompt, completion),) = service.sql(
        "SELECT count(*), sum(u.prompt_tokens), sum(u.completion_tokens) FROM usage_events u "
        "JOIN batch_items i USING (request_id) WHERE i.batch_id = %s",
        batch.id,
    )
    assert rows == 5
    assert prompt == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert completion == sum(body["usage"]["completion_tokens"] for body in bodies)
    assert batch.usage is not None
    assert batch.usage.input_tokens_details.cached_tokens == sum(
        body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies
    )


def cached_by_chat(client: openai.OpenAI, text: str, *, is_streamed: bool = False) -> int:
    """Cached tokens that the usage of a chat tells."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    if not is_streamed:
        return cached(
            client.chat.completions.create(model="scripted", messages=messages, max_tokens=2)
        )
    stream = client.chat.completions.create(
        model="scripted",
        messages=messages,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    return cached(list(stream)[-1])


def cached_by_completion(
    client: openai.OpenAI, text: str, *, n: int = 1, is_streamed: bool = False
) -> int:
    """Cached tokens that the usage of a completion tells."""
    if not is_streamed:
        return cached(client.completions.create(model="scripted", prompt=text, n=n, max_tokens=2))
    stream = client.completions.create(
        model="scripted",
        prompt=text,
        n=n,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    return cached(list(stream)[-1])


def cached(told: ChatCompletion | ChatCompletionChunk | Completion) -> int:
    """The cached tokens of the last word."""
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    assert told.usage.prompt_tokens_details.cached_tokens is not None
    return told.usage.prompt_tokens_details.cached_tokens


def test_usage_tells_a_cached_prompt_from_a_fresh_one(service: LiveService) -> None:
    client = service.client()
    tenant = service.run("admin", "tenant", "create", "another")
    other = service.client(api_key=service.run("admin", "key", "create", tenant))
    chat, plain = (
        "as chat, thirty-two bytes and more",
        "Zebras begin no other prompt that is asked here",
    )
    # Another chat may have begun as every chat of a user does.
    assert cached_by_chat(client, chat) <= len("<user\n")
    assert cached_by_chat(client, chat) >= len(chat)
    assert cached_by_chat(client, chat, is_streamed=True) >= len(chat)
    assert cached_by_completion(client, plain, n=4) == 0
    assert 32 <= cached_by_completion(client, plain) < len(plain)
    assert 32 <= cached_by_completion(client, plain, n=4, is_streamed=True) < len(plain)
    assert cached_by_chat(other, chat) == 0
    assert cached_by_completion(other, plain) == 0


def batch_on(client: openai.OpenAI, lines: list[dict[str, object]], folder: Path) -> str:
    """Its id, when a batch of these lines has ended."""
    source = folder / "lines.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    uploaded = client.files.create(file=source, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", 90)
    return batch.id


def refusals(service: LiveService, key: str, prompt: str) -> list[httpx.Response]:
    """Requests that go wrong in every way there is, each with the key and the prompt in it."""
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 3}
    wrong: list[tuple[str, dict[str, object]]] = [
        ("completions", {"json": body | {"temperature": prompt}}),
        ("completions", {"json": body | {"max_tokens": 10**9}}),
        ("completions", {"json": body | {"model": "nobody"}}),
        ("completions", {"json": body | {"prompt": [prompt, 3]}}),
        ("completions", {"json": body | {"prompt": prompt * 1000}}),
        ("completions", {"json": body | {"stop": [prompt] * 5}}),
        ("completions", {"json": body | {"tools": [prompt]}}),
        ("chat/completions", {"json": body}),
        ("chat/completions", {"json": {"model": "scripted", "messages": [{"role": prompt}]}}),
        ("completions", {"content": f'{{"prompt": "{prompt}'.encode()}),
        ("completions", {"content": prompt.encode(), "headers": {"content-type": "text/plain"}}),
        ("batches", {"json": {"input_file_id": "file-none", "metadata": {"prompt": [prompt]}}}),
        ("files", {"files": {"file": ("a", prompt.encode())}, "data": {"purpose": "x"}}),
        ("nowhere", {"json": body}),
        (f"completions?api_key={key}", {"json": body | {"n": 0}}),
    ]
    answers = []
    base = f"http://{service.process.host}:{service.process.port}/v1/"
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with httpx.Client(base_url=base, timeout=30) as client:
        for path, content in wrong:
            own = dict(headers) if "files" not in content else {"authorization": f"Bearer {key}"}
            own |= cast("dict[str, str]", content.pop("headers", {}))
            answers.append(client.post(path, headers=own, **cast("Any", content)))
        for value in (f"Bearer {key}x", f"Basic {key}", key, f"Bearer {key} {prompt}"):
            answers.append(client.post("completions", headers={"authorization": value}, json=body))
        answers.append(client.get("models", params={"key": key, "prompt": prompt}))
    return answers


def test_a_key_is_nowhere_and_a_prompt_only_where_it_must_be(
    service: LiveService, tmp_path: Path
) -> None:
    """Marked ones are sent in every way, and looked for in all that the service leaves."""
    prompt, custom_id = f"prompt-{secrets.token_hex(16)}", f"line-{secrets.token_hex(16)}"
    tenant = service.run("admin", "tenant", "create", "marked")
    key = service.run("admin", "key", "create", tenant)
    client = service.client(api_key=key)
    assert say(client, prompt) == prompt
    line: dict[str, object] = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    good: dict[str, object] = {"model": "scripted", "prompt": prompt, "max_tokens": 50}
    batch_id = batch_on(client, [line | {"body": good}], tmp_path)
    answers = refusals(service, key, prompt)
    assert all(answer.is_client_error for answer in answers), answers
    said = "".join(answer.text + str(answer.headers) for answer in answers)
    assert prompt not in said
    assert key not in said
    # While a stream of it is under way.
    with client.completions.create(
        model="scripted", prompt=prompt, max_tokens=50, temperature=0, stream=True
    ) as stream:
        next(iter(stream))
        of_key, of_prompt, of_line = (Traces(service, each) for each in (key, prompt, custom_id))
        places = of_prompt.in_redis()
        assert places
        assert {place.split(":")[1] for place in places} <= {"live", "log", "feed"}
        # What Valkey holds it writes into its own journal, too.
        assert {name.split("/")[0] for name in of_prompt.in_files()} <= {"valkey"}
        for traces in (of_key, of_line):
            assert traces.in_redis() == set()
            assert traces.in_files() == set()
        for traces in (of_key, of_prompt, of_line):
            assert traces.in_statements() == []
            assert traces.in_command_lines() == set()
    assert of_key.in_tables() == set()
    assert of_prompt.in_tables() <= {"batch_items", "request_outputs"}
    assert of_line.in_tables() == {"batch_items"}
    # What is there is found: the searches can fail.
    assert Traces(service, tenant).in_tables() >= {"tenants", "api_keys", "audit_log"}
    assert Traces(service, batch_id).in_tables() >= {"batches", "batch_items"}
    assert Traces(service, service.process.api_key).in_files() == {"demo.env"}
    assert any(name.startswith("logs/") for name in Traces(service, "database").in_files())


def test_a_revoked_key_asks_nothing_more_and_what_it_had_asked_is_said_and_billed(
    service: LiveService,
) -> None:
    tenant = service.run("admin", "tenant", "create", "revoked")
    client = service.client(api_key=service.run("admin", "key", "create", tenant))
    prompt = "what was asked is said to its end, " * 4
    stream = client.completions.create(
        model="scripted", prompt=prompt, max_tokens=300, temperature=0, stream=True
    )
    first = next(iter(stream))
    ((key_id,),) = service.sql("SELECT key_id FROM api_keys WHERE tenant_id = %s", tenant)
    service.run("admin", "key", "revoke", str(key_id), "--yes")
    revoked_at = time.monotonic()
    said = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
    assert said == prompt

    def is_refused() -> bool:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return True
        return False

    until(is_refused, 5)
    assert time.monotonic() - revoked_at < 5
    billed = "SELECT completion_tokens, outcome FROM usage_events WHERE key_id = %s"
    until(lambda: bool(service.sql(billed, key_id)), 5)
    # The token that ended it is one of those produced.
    assert service.sql(billed, key_id) == [(len(prompt) + 1, "finished")]


def test_the_oldest_sdk_works_too(service: LiveService) -> None:
    oldest = Path(sys.prefix) / "openai-oldest"
    program = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
assert openai.__version__ == "1.60.0", openai.__version__
messages = [{"role": "user", "content": "hello"}]
whole = client.chat.completions.create(model="scripted", messages=messages, max_tokens=40)
assert "hello" in whole.choices[0].message.content
stream = client.chat.completions.create(model="scripted", messages=messages, max_tokens=40,
    stream=True, stream_options={"include_usage": True})
chunks = list(stream)
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == whole.choices[0].message.content
try:
    client.chat.completions.create(model="nobody", messages=messages)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise SystemExit("no error")
print("fine")
"""
    base_url = f"http://{service.process.host}:{service.process.port}/v1"
    done = subprocess.run(
        [sys.executable, "-c", program, base_url, service.process.api_key],
        env={**os.environ, "PYTHONPATH": str(oldest)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_the_stages_of_a_stream_add_up_to_when_its_reader_had_the_first_words(
    service: LiveService,
) -> None:
    client = service.client()
    sent_at = time.monotonic()
    with client.completions.with_streaming_response.create(
        model="scripted", prompt="how long did this take?", max_tokens=40, stream=True
    ) as response:
        request_id = response.headers["x-request-id"].removeprefix("req_")
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        seen_s = time.monotonic() - sent_at
        assert list(lines)
    query = (
        "SELECT told_s, first_token_s, tell_s, accept_s, queue_s, place_s, wait_s, prefill_s, "
        "publish_s FROM request_stages WHERE request_id = %s"
    )
    until(lambda: service.sql(query, request_id)[0][0] is not None, 5)
    ((told_s, first_token_s, tell_s, *stages),) = cast(
        "list[tuple[float, ...]]", service.sql(query, request_id)
    )
    assert all(stage >= 0 for stage in stages)
    assert sum(stages) == pytest.approx(first_token_s)
    assert first_token_s + tell_s == pytest.approx(told_s)
    # What the reader saw beyond that is this machine's; `headrace bench stages` measures it.
    assert 0 < told_s <= seen_s


class Load:
    """Callers that ask again and again, as people with an SDK do."""

    def __init__(self, service: LiveService, num_callers: int) -> None:
        self._service = service
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(num_callers)
        ]
        self.num_right = 0
        self.num_refused = 0
        self.wrong: list[str] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        client = self._service.client(max_retries=2)
        count = 0
        while not self._stop.is_set():
            count += 1
            prompt = f"caller {number} asks for the {count}th time, and wants it all. "
            try:
                answer = say(client, prompt)
            except (openai.OpenAIError, httpx.HTTPError):  # httpx's when cut in mid-stream
                self.num_refused += 1
                self._stop.wait(0.1)
                continue
            if answer == prompt:
                self.num_right += 1
            elif not prompt.startswith(answer):
                self.wrong.append(answer)


@pytest.mark.parametrize("victim", ["gateway", "replica", "dispatcher"])
def test_a_killed_process_comes_back_and_answers_again(service: LiveService, victim: str) -> None:
    with Load(service, 6) as load:
        until(lambda: load.num_right >= 6, 60)
        killed = service.pid_of(victim)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: service.pid_of(victim) not in (None, killed), 60)
        right_then = load.num_right
        until(lambda: load.num_right >= right_then + 12, 60)
    assert load.wrong == []


def test_a_killed_replica_goes_on_where_it_stopped(service: LiveService) -> None:
    prompt = "".join(f"{number:03} " for number in range(80))
    client = service.client()
    stream = client.completions.create(
        model="scripted", prompt=prompt, max_tokens=400, temperature=0, stream=True
    )
    text = ""
    killed = None
    for chunk in stream:
        text += chunk.choices[0].text
        if killed is None and len(text) > 60:
            killed = service.pid_of("replica")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
    assert killed is not None
    assert text == prompt


def test_after_all_of_it_every_request_has_one_ending_and_one_usage_row(
    service: LiveService,
) -> None:
    # Last in the module: what a killed gateway had written and not queued ends after a minute.
    until(lambda: service.sql("SELECT count(*) FROM requests WHERE state = 'held'") == [(0,)], 100)
    unpaired = service.sql(
        "SELECT r.request_id FROM requests r LEFT JOIN usage_events u USING (request_id) "
        "WHERE u.request_id IS NULL OR u.outcome <> r.state"
    )
    assert unpaired == []
