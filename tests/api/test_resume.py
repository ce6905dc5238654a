"""A stream goes on where it broke, at any gateway; who asked decides what a broken one means."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from starlette.types import Message

from api.event_labels import EventLabels
from api.streaming import StreamAnswer
from control.protocol.responses import CHAT, ChunkEncoder, ReplyHead
from control.streams.follower import Subscription
from control.streams.functions import invoke, lapse
from control.streams.keys import ModelKeys
from engine.interface.generation_delta import FinishReason, GenerationDelta, Usage
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.raw_http import request
from tests.api.scripted_replica import (
    Run,
    ScriptedReplica,
    keep_silent_until_cancelled,
    talk_until_cancelled,
)
from tests.end_to_end.live_service import until

WAIT_S = 10
RESUMABLE = {"x-resume-grace": "30"}

Event = tuple[str | None, str]
Start = Callable[..., "Stream"]


class Paced:
    """A script of words, each said when the test lets it; without words it only ends, happily."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self._permits = threading.Semaphore(0)

    def let(self, count: int = 1) -> None:
        self._permits.release(count)

    def __call__(self, run: Run) -> Iterator[GenerationDelta]:
        for place, word in enumerate(self.words):
            while not self._permits.acquire(timeout=0.01):
                if run.cancelled.is_set():
                    yield run.end("cancelled")
                    return
            is_last = place == len(self.words) - 1
            yield run.say(word, num_tokens=2, finish=FinishReason.STOP if is_last else None)
        yield run.end()


def events(text: str) -> list[Event]:
    """The stream's events as id and data, each ended by one blank line."""
    assert text.endswith("\n\n"), text[-200:]
    found: list[Event] = []
    for block in text[:-2].split("\n\n"):
        *named, data = block.split("\n")
        assert len(named) <= 1, block
        assert data.startswith("data: "), block
        found.append((named[0].removeprefix("id: ") if named else None, data[6:]))
    return found


def words_of(found: list[Event]) -> str:
    chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
    return "".join(c["choices"][0]["text"] for c in chunks if c.get("choices"))


class Stream:
    """A stream on a socket of its own, which breaks when the test says so."""

    def __init__(
        self, served: Served, port: int, headers: dict[str, str], **fields: object
    ) -> None:
        body = {"model": served.model, "prompt": "x", "stream": True, **fields}
        shown = {"Authorization": f"Bearer {served.key}", **headers}
        self.said = ""
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        asked = request("/v1/completions", headers=shown, body=json.dumps(body).encode())
        self._socket.sendall(asked)

    def read(self, words: str) -> None:
        """Read until the words have come."""
        while words not in self.said:
            more = self._socket.recv(65536)
            assert more, f"closed before {words!r}: {self.said!r}"
            self.said += more.decode()

    def events(self) -> list[Event]:
        """All events, once the stream has ended."""
        self.read("[DONE]\n\n")
        body = self.said.partition("\r\n\r\n")[2]
        return events("".join(re.split(r"(?:\r\n)?[0-9a-f]+\r\n", body)).rstrip("\r\n") + "\n\n")

    def peek(self) -> None:
        """Wait until something has come, and leave it there."""
        assert self._socket.recv(1, socket.MSG_PEEK)

    def leave(self) -> None:
        self._socket.close()


@pytest.fixture
def start(live: LiveGateway, served: Served) -> Iterator[Start]:
    """Starts streams; those that are left over break with the test."""
    streams: list[Stream] = []

    def begin(
        headers: dict[str, str] | None = None, port: int | None = None, **fields: object
    ) -> Stream:
        streams.append(Stream(served, port or live.port, headers or {}, **fields))
        return streams[-1]

    yield begin
    for stream in streams:
        stream.leave()


def resume(
    http: httpx.Client, completion_id: str, last: int | None = None, url: str = ""
) -> httpx.Response:
    headers = {} if last is None else {"last-event-id": f"{completion_id}:{last}"}
    return http.get(f"{url}/v1/completions/{completion_id}/stream", headers=headers)


def is_kept(served: Served, run: Run) -> bool:
    key = ModelKeys(served.model).live(run.request.request_id)
    until_ms, followers = served.client.hmget(key, ["until", "followers"])
    return until_ms is not None and followers == b""


def test_events_have_ids_only_if_the_request_asked_for_them(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    body = {"model": served.model, "prompt": "hi", "stream": True}
    plain = events(http.post("/v1/completions", json=body).text)
    assert {name for name, _ in plain} == {None}
    named = events(http.post("/v1/completions", json=body, headers=RESUMABLE).text)
    completion_id = f"cmpl-{replica.latest().request.request_id}"
    assert [name for name, _ in named] == [
        f"{completion_id}:1",
        f"{completion_id}:2",
        f"{completion_id}:2",
        None,
    ]
    assert named[-1][1] == "[DONE]"
    end = json.loads(named[2][1])
    assert end["x_usage"]["completion_tokens"] == 2
    assert [data.partition('"choices"')[2] for _, data in named[:2]] == [
        data.partition('"choices"')[2] for _, data in plain[:2]
    ]


def test_heartbeats_have_no_ids(
    start_gateway: Callable[..., LiveGateway],
    served: Served,
    replica: ScriptedReplica,
    start: Start,
) -> None:
    gateway = start_gateway(heartbeat_s=0.05)
    replica.script = Paced("never said")
    stream = start(RESUMABLE, port=gateway.port)
    stream.read("data: ")
    assert "\nid: " not in stream.said


def test_the_official_client_reads_a_stream_with_ids_and_heartbeats(
    start_gateway: Callable[..., LiveGateway], served: Served, replica: ScriptedReplica
) -> None:
    script = Paced("one ", "two")
    replica.script = script
    gateway = start_gateway(heartbeat_s=0.05)
    with openai.OpenAI(base_url=gateway.url, api_key=served.key, max_retries=0) as sdk:
        stream = sdk.completions.create(
            model=served.model, prompt="x", stream=True, extra_headers=RESUMABLE
        )
        said = [next(stream).choices[0].text for _ in range(2)]
        script.let()
        said.append(next(chunk.choices[0].text for chunk in stream if chunk.choices[0].text))
        said.append(next(stream).choices[0].text)
        script.let()
        said += [chunk.choices[0].text for chunk in stream]
    assert said[:4] == ["", "", "one ", ""]
    assert "".join(said) == "one two"


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_stream_goes_on_where_it_broke_at_any_gateway(
    start_gateway: Callable[..., LiveGateway],
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    is_elsewhere: bool,
    start: Start,
) -> None:
    script = Paced("one ", "two ", "three ", "four")
    replica.script = script
    url = f"http://127.0.0.1:{start_gateway().port}" if is_elsewhere else ""
    stream = start(RESUMABLE)
    script.let(2)
    stream.read('"two "')
    run = replica.latest()
    stream.leave()
    until(lambda: is_kept(served, run), WAIT_S)
    script.let(2)
    rest = events(resume(http, f"cmpl-{run.request.request_id}", 4, url).text)
    assert words_of(rest) == "three four"
    assert [name.rpartition(":")[2] for name, _ in rest if name] == ["6", "8", "8"]
    assert rest[-1] == (None, "[DONE]")
    assert not run.cancelled.is_set()


def test_an_ended_stream_is_told_again_until_its_log_expires(
    http: httpx.Client, served: Served, replica: ScriptedReplica
) -> None:
    body = {"model": served.model, "prompt": "hi", "stream": True}
    told = http.post("/v1/completions", json=body, headers=RESUMABLE)
    request_id = replica.latest().request.request_id
    completion_id = f"cmpl-{request_id}"
    assert resume(http, completion_id).text == told.text
    after = http.get(f"/v1/completions/{completion_id}/stream", params={"starting_after": 1})
    assert events(after.text) == events(told.text)[1:]
    keys = ModelKeys(served.model)
    served.client.delete(keys.live(request_id), keys.log(request_id))
    gone = resume(http, completion_id)
    assert gone.status_code == 410
    assert gone.json()["error"]["code"] == "stream_expired"


@pytest.mark.parametrize(
    ("last_event_id", "starting_after"),
    [("{id}:99", None), (None, 99), ("cmpl-another:1", None), ("{id}", None), ("{id}:-1", None)],
)
def test_an_offset_that_cannot_be_is_refused_and_harms_nothing(
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    last_event_id: str | None,
    starting_after: int | None,
    start: Start,
) -> None:
    script = Paced("one ", "two ")
    replica.script = script
    stream = start(RESUMABLE)
    script.let()
    stream.read("one ")
    run = replica.latest()
    stream.leave()
    until(lambda: is_kept(served, run), WAIT_S)
    completion_id = f"cmpl-{run.request.request_id}"
    headers = {} if last_event_id is None else {"last-event-id": last_event_id}
    params = {} if starting_after is None else {"starting_after": starting_after}
    refused = http.get(
        f"/v1/completions/{completion_id}/stream",
        headers={k: v.format(id=completion_id) for k, v in headers.items()},
        params=params,
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_value"
    script.let()
    assert words_of(events(resume(http, completion_id).text)) == "one two "


def test_two_readers_each_get_everything_and_one_that_leaves_harms_nobody(
    live: LiveGateway, http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    script = Paced("one ", "two ", "three ")
    replica.script = script
    first = start()
    script.let()
    first.read("one ")
    run = replica.latest()
    completion_id = f"cmpl-{run.request.request_id}"
    answers: list[str] = []
    second = threading.Thread(target=lambda: answers.append(resume(http, completion_id).text))
    second.start()
    until(lambda: live.gateway.follower.num_subscriptions == 2, WAIT_S)
    first.leave()
    until(lambda: live.gateway.follower.num_subscriptions == 1, WAIT_S)
    script.let(2)
    second.join(WAIT_S)
    assert words_of(events(answers[0])) == "one two three "
    assert not run.cancelled.is_set()


def test_the_last_reader_to_leave_cancels_unless_a_grace_was_asked_for(
    served: Served, replica: ScriptedReplica, start: Start
) -> None:
    replica.script = talk_until_cancelled
    stream = start({"x-resume-grace": "0"})
    stream.read("word ")
    stream.leave()
    assert replica.latest().cancelled.wait(WAIT_S)
    stream = start({"x-resume-grace": "1"})
    stream.read("word ")
    run = replica.latest()
    stream.leave()
    until(lambda: is_kept(served, run), WAIT_S)
    # The dispatcher asks again and again; the gateway may be dead by then.
    call = lapse(ModelKeys(served.model), run.request.request_id, "")
    assert invoke(served.client, call) == b"kept"
    until(lambda: invoke(served.client, call) == b"assigned", WAIT_S)
    assert run.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("value", ["61", "-1", "1.5", "soon", "", "+5"])
def test_a_grace_that_is_none_is_refused(http: httpx.Client, served: Served, value: str) -> None:
    body = {"model": served.model, "prompt": "hi"}
    refused = http.post("/v1/completions", json=body, headers={"x-resume-grace": value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-resume-grace"


def test_a_request_says_how_it_stands_and_can_be_cancelled_twice(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    replica.script = talk_until_cancelled
    stream = start(stream_options={"include_usage": True})
    stream.read("word ")
    run = replica.latest()
    path = f"/v1/completions/cmpl-{run.request.request_id}"
    running = http.get(path).json()
    assert running["status"] == "running"
    assert running["object"] == "text_completion.status"
    assert running["usage"]["prompt_tokens"] == 1
    assert running["usage"]["completion_tokens"] > 0
    assert running["queue_position"] is None
    cancelled = http.post(f"{path}/cancel")
    assert cancelled.status_code == 200
    assert run.ended.wait(WAIT_S)
    *_, usage, error, done = stream.events()
    assert json.loads(error[1])["error"]["code"] == "cancelled"
    assert json.loads(error[1])["x_usage"] == json.loads(usage[1])["usage"]
    assert done[1] == "[DONE]"
    again = http.post(f"{path}/cancel")
    assert again.status_code == 200
    assert again.json()["status"] == "cancelled"
    assert http.get(path).json() == again.json()


def test_a_queued_request_knows_its_place(
    start_gateway: Callable[..., LiveGateway], served: Served, start: Start
) -> None:
    unserved = served.register("waiting")
    gateway = start_gateway()
    streams = [start(port=gateway.port, model=unserved) for _ in range(2)]
    keys = ModelKeys(unserved)
    until(lambda: served.client.scard(keys.open) == 2, WAIT_S)
    headers = {"authorization": f"Bearer {served.key}"}
    places = []
    for member in served.client.smembers(keys.open):
        assert isinstance(member, bytes)
        url = f"{gateway.url}/completions/cmpl-{member.decode()}"
        shown = httpx.get(url, headers=headers, timeout=WAIT_S).json()
        assert shown["status"] == "queued"
        assert shown["usage"]["completion_tokens"] == 0
        places.append(shown["queue_position"])
    assert sorted(places) == [1, 2]
    assert len(streams) == 2


def test_a_drain_tells_the_usage_and_the_stream_goes_on_elsewhere(
    start_gateway: Callable[..., LiveGateway],
    http: httpx.Client,
    served: Served,
    replica: ScriptedReplica,
    start: Start,
) -> None:
    script = Paced("one ", "two ")
    replica.script = script
    gateway = start_gateway()
    options = {"include_usage": True}
    stream = start(RESUMABLE, port=gateway.port, stream_options=options)
    script.let()
    stream.read("one ")
    gateway.stop(timeout_s=WAIT_S)
    *_, usage, error, done = stream.events()
    assert usage[0] is error[0] is done[0] is None
    frame = json.loads(error[1])
    assert frame["error"]["code"] == "server_restarting"
    assert frame["x_usage"] == json.loads(usage[1])["usage"]
    assert frame["x_usage"]["completion_tokens"] == 2
    run = replica.latest()
    assert is_kept(served, run)
    script.let()
    assert words_of(events(resume(http, f"cmpl-{run.request.request_id}", 2).text)) == "two "


def test_a_reader_behind_a_long_log_is_no_slow_one(
    http: httpx.Client, served: Served, replica: ScriptedReplica, start: Start
) -> None:
    replica.script = keep_silent_until_cancelled
    stream = start(RESUMABLE)
    run = replica.latest()
    stream.leave()
    until(lambda: is_kept(served, run), WAIT_S)
    replica.publish(run, 1, [run.say("x") for _ in range(6000)])
    run.cancelled.set()
    assert run.ended.wait(WAIT_S)
    told = events(resume(http, f"cmpl-{run.request.request_id}").text)
    assert words_of(told) == "x" * 6000


def _deltas() -> list[GenerationDelta]:
    """Two choices; tokens without words, words without tokens, and an ending."""
    return [
        GenerationDelta("r", 0, 0, 0, (1,), "a"),
        GenerationDelta("r", 1, 1, 1, (1,), ""),
        GenerationDelta("r", 1, 2, 2, (1, 2), "b"),
        GenerationDelta("r", 1, 3, 4, (3,), "c", FinishReason.STOP),
        GenerationDelta("r", 0, 4, 5, (2,), ""),
        GenerationDelta("r", 0, 5, 6, (), "held", FinishReason.LENGTH),
        GenerationDelta("r", 0, 6, 6, usage=Usage(7, 6)),
    ]


async def _told(served: Served, after: int | None) -> list[Event]:
    head = ReplyHead(CHAT, "0" * 26, 0, served.version)
    answer = StreamAnswer(
        encoder=ChunkEncoder(head, includes_usage=True),
        includes_usage=True,
        num_choices=2,
        prompt_tokens=7,
        heartbeat_s=5,
        labels=EventLabels("chatcmpl-r", after),
    )
    subscription = Subscription(ModelKeys("m"), "r")
    for delta in _deltas():
        subscription.put(delta)
    sent = b""

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    await answer.run(subscription, send)
    return events(sent.decode())


async def test_wherever_a_stream_breaks_the_rest_is_all_the_rest(served: Served) -> None:
    """Who skips the events of the last id that it has beyond the first gets each event once."""
    whole = await _told(served, None)
    assert [name.rpartition(":")[2] if name else "" for name, _ in whole] == (
        ["0", "0", "1", "4", "5", "5", "6", "6", "6", ""]
    )
    for num_seen in range(1, len(whole)):
        seen = whole[:num_seen]
        last = seen[-1][0]
        assert last is not None
        skipped = sum(name == last for name, _ in seen) - 1
        rest = await _told(served, int(last.rpartition(":")[2]))
        assert seen + rest[skipped:] == whole, f"after {num_seen} events"
