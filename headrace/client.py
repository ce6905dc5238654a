"""Calls of Headrace that survive a broken connection, made with the official OpenAI SDK.

    client = Headrace(openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="hr-..."))
    for chunk in client.chat.stream(model="m", messages=[{"role": "user", "content": "Hi"}]):
        print(chunk.choices[0].delta.content or "", end="")

Each call has an idempotency key of its own, so however often it must be repeated it runs once. A
stream goes on after the last event that arrived; one that ends without [DONE] was interrupted,
which the SDK by itself takes for its end. Whoever stops reading a stream cancels its request.
Everything else is the SDK's.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.reading import Reading

Whole = TypeVar("Whole", bound=openai.BaseModel)
Chunk = TypeVar("Chunk", bound=openai.BaseModel)


class Headrace:
    """The two generation endpoints over a client of the SDK."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.chat = Endpoint[ChatCompletion, ChatCompletionChunk](
            client, "/chat/completions", ChatCompletionChunk
        )
        self.completions = Endpoint[Completion, Completion](client, "/completions", Completion)


class AsyncHeadrace:
    """The same over an asynchronous client."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.chat = AsyncEndpoint[ChatCompletion, ChatCompletionChunk](
            client, "/chat/completions", ChatCompletionChunk
        )
        self.completions = AsyncEndpoint[Completion, Completion](client, "/completions", Completion)


class _Endpoint(Generic[Whole, Chunk]):
    def __init__(self, client: Any, path: str, chunk: type[Chunk]) -> None:
        self._client, self._path, self._chunk = client, path, chunk
        self._resource = _resource(client, path)
        self._once = _resource(client.with_options(max_retries=0), path)


class Endpoint(_Endpoint[Whole, Chunk]):
    """One endpoint."""

    def create(self, **body: Any) -> Whole:
        """The whole answer; the SDK repeats what fails, under the same key."""
        whole: Whole = self._resource.create(**Reading().asking(body))
        return whole

    def stream(self, **body: Any) -> Iterator[Chunk]:
        """The answer's chunks, each once and in order. Raises `openai.APIError`."""
        reading = Reading()
        while not reading.is_over:
            try:
                request = reading.asking({**body, "stream": True})
                with self._once.with_streaming_response.create(**request) as response:
                    reading.begin(response)
                    for line in _lines(response):
                        for chunk in reading.take(line):
                            yield self._chunk.construct(**chunk)
                    reading.end()
            except GeneratorExit:
                with suppress(openai.OpenAIError):
                    self._client.post(f"{self._path}/{reading.name}/cancel", cast_to=object)
                raise
            except openai.APIError as error:
                time.sleep(reading.pause_s(error))


class AsyncEndpoint(_Endpoint[Whole, Chunk]):
    """One endpoint, asynchronously."""

    async def create(self, **body: Any) -> Whole:
        """The whole answer; the SDK repeats what fails, under the same key."""
        whole: Whole = await self._resource.create(**Reading().asking(body))
        return whole

    async def stream(self, **body: Any) -> AsyncIterator[Chunk]:
        """The answer's chunks, each once and in order. Raises `openai.APIError`."""
        reading = Reading()
        while not reading.is_over:
            try:
                request = reading.asking({**body, "stream": True})
                async with self._once.with_streaming_response.create(**request) as response:
                    reading.begin(response)
                    async for line in _async_lines(response):
                        for chunk in reading.take(line):
                            yield self._chunk.construct(**chunk)
                    reading.end()
            except (GeneratorExit, asyncio.CancelledError):
                with suppress(openai.OpenAIError):
                    await self._client.post(f"{self._path}/{reading.name}/cancel", cast_to=object)
                raise
            except openai.APIError as error:
                await asyncio.sleep(reading.pause_s(error))


def _resource(client: Any, path: str) -> Any:
    return client.chat.completions if path.startswith("/chat") else client.completions


def _lines(response: Any) -> Iterator[str]:
    try:
        yield from response.iter_lines()
    except Exception as error:  # Whatever the SDK's transport calls it, the connection broke.
        raise openai.APIConnectionError(request=response.http_request) from error


async def _async_lines(response: Any) -> AsyncIterator[str]:
    try:
        async for line in response.iter_lines():
            yield line
    except Exception as error:
        raise openai.APIConnectionError(request=response.http_request) from error
