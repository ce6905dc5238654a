"""The client's helper: a broken connection is nothing that its user sees."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import openai
import pytest

from engine.interface.generation_delta import FinishReason, GenerationDelta
from headrace.client import AsyncHeadrace, Headrace
from tests.api.breaking_proxy import BreakingProxy
from tests.api.conftest import Served
from tests.api.live_gateway import LiveGateway
from tests.api.scripted_replica import Run, ScriptedReplica, talk_until_cancelled

WAIT_S = 10
WORDS = [f"word{number} " for number in range(40)]
MESSAGES = [{"role": "user", "content": "hi"}]


def many_words(run: Run) -> Iterator[GenerationDelta]:
    for word in WORDS:
        yield run.say(word, num_tokens=3)
    yield run.say("end", finish=FinishReason.STOP)
    yield run.end()


@pytest.fixture
def proxy(live: LiveGateway) -> Iterator[BreakingProxy]:
    with BreakingProxy(live.port) as breaking:
        yield breaking


@pytest.fixture
def client(proxy: BreakingProxy, served: Served) -> Iterator[Headrace]:
    url = f"http://127.0.0.1:{proxy.port}/v1"
    with openai.OpenAI(base_url=url, api_key=served.key, timeout=WAIT_S) as sdk:
        yield Headrace(sdk)


def test_a_stream_that_breaks_everywhere_is_read_once(
    client: Headrace, proxy: BreakingProxy, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = many_words
    # After so many bytes each connection breaks: in the headers, in an id, in a chunk, between two.
    proxy.breaks = [10, 700, 1100, 1111, 1500, 2000, 900, 3000]
    chunks = list(
        client.chat.stream(
            model=served.model, messages=MESSAGES, stream_options={"include_usage": True}
        )
    )
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert said == ["", *WORDS, "end", None]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 121
    assert proxy.breaks == []
    assert len(replica.runs) == 1


async def test_the_asynchronous_helper_does_the_same(
    proxy: BreakingProxy, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = many_words
    proxy.breaks = [900, 2000]
    url = f"http://127.0.0.1:{proxy.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=served.key, timeout=WAIT_S) as sdk:
        stream = AsyncHeadrace(sdk).completions.stream(model=served.model, prompt="hi")
        said = [chunk.choices[0].text async for chunk in stream]
        whole = await AsyncHeadrace(sdk).completions.create(model=served.model, prompt="hi")
    assert said == [*WORDS, "end", ""]
    assert whole.choices[0].text == "".join(WORDS) + "end"
    assert len(replica.runs) == 2


def test_a_whole_answer_is_asked_for_again_under_its_key(
    client: Headrace, proxy: BreakingProxy, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = many_words
    proxy.breaks = [0, 300]
    answer = client.chat.create(model=served.model, messages=MESSAGES)
    assert answer.choices[0].message.content == "".join(WORDS) + "end"
    assert len(replica.runs) == 1


def test_a_restarting_gateway_is_left_for_another(
    start_gateway: Callable[..., LiveGateway],
    served: Served,
    replica: ScriptedReplica,
) -> None:
    may_end = threading.Event()

    def end_when_told(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("one ")
        assert may_end.wait(WAIT_S)
        yield run.say("two", finish=FinishReason.STOP)
        yield run.end()

    replica.script = end_when_told
    first, second = start_gateway(), start_gateway()
    with BreakingProxy(first.port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/v1"
        with openai.OpenAI(base_url=url, api_key=served.key, timeout=WAIT_S) as sdk:
            stream = Headrace(sdk).completions.stream(model=served.model, prompt="hi")
            said = [next(stream).choices[0].text]
            proxy.target = second.port
            first.stop(timeout_s=WAIT_S)
            may_end.set()
            said += [chunk.choices[0].text for chunk in stream]
    assert said == ["one ", "two", ""]
    assert len(replica.runs) == 1


def test_whoever_stops_reading_cancels(
    client: Headrace, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = talk_until_cancelled
    stream = client.completions.stream(model=served.model, prompt="hi")
    assert next(stream).choices[0].text == "word "
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert replica.latest().cancelled.wait(WAIT_S)


@pytest.mark.parametrize("error", ["replica_lost", "cancelled", "deadline_exceeded"])
def test_an_end_that_is_no_good_one_is_raised(
    client: Headrace, served: Served, replica: ScriptedReplica, error: str
) -> None:
    def fail(run: Run) -> Iterator[GenerationDelta]:
        yield run.say("Half")
        yield run.end(error)

    replica.script = fail
    stream = client.completions.stream(model=served.model, prompt="hi")
    assert next(stream).choices[0].text == "Half"
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.code == error
    assert len(replica.runs) == 1


def test_a_server_that_gives_no_ids_is_read_plainly_and_its_early_end_raised(
    served: Served,
) -> None:
    chunk = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    answers = [head + chunk % b"a" + chunk % b"b" + b"data: [DONE]\n\n", head + chunk % b"a"]
    with BreakingProxy(0) as proxy:
        proxy.answers = answers
        url = f"http://127.0.0.1:{proxy.port}/v1"
        with openai.OpenAI(base_url=url, api_key="hr-x", timeout=WAIT_S) as sdk:
            helper = Headrace(sdk).completions
            stream = helper.stream(model=served.model, prompt="hi")
            assert [chunk.choices[0].text for chunk in stream] == ["a", "b"]
            with pytest.raises(openai.APIConnectionError):
                list(helper.stream(model=served.model, prompt="hi"))
    assert proxy.answers == []


def test_a_refusal_is_raised_at_once(client: Headrace, proxy: BreakingProxy) -> None:
    with pytest.raises(openai.NotFoundError):
        list(client.completions.stream(model="nothing", prompt="hi"))
    assert proxy.num_connections == 1


def test_a_reader_that_is_cancelled_cancels_its_request(
    proxy: BreakingProxy, served: Served, replica: ScriptedReplica
) -> None:
    replica.script = talk_until_cancelled

    async def read_a_little() -> None:
        url = f"http://127.0.0.1:{proxy.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=served.key, timeout=WAIT_S) as sdk:

            async def read() -> None:
                async for _ in AsyncHeadrace(sdk).completions.stream(
                    model=served.model, prompt="hi"
                ):
                    has_begun.set()

            has_begun = asyncio.Event()
            reading = asyncio.create_task(read())
            await has_begun.wait()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    asyncio.run(read_a_little())
    assert replica.latest().cancelled.wait(WAIT_S)
