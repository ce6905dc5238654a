"""Those who ask while everything around them dies: what each wants, and what it got.

The model says its prompt back, so every answer is known beforehand; and whoever leaves does so at a
point of the stream that was chosen beforehand.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

import httpx

LETTERS = "abcdefghij klmnop qrstuvw xyz, "
ID_PREFIX = "req_"


class Manner(StrEnum):
    """How a caller means the request to end."""

    FINISH = "finish"
    LEAVE_AT_ONCE = "leave at once"
    LEAVE_BEFORE_WORDS = "leave before the first words"
    LEAVE_AMONG_WORDS = "leave among the words"
    LEAVE_AFTER_WORDS = "leave after the last word"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Wish:
    """One request as it is planned.

    `patience` is how far the caller goes along: seconds before the first words, chunks after them.
    """

    number: int
    manner: Manner
    prompt: str
    max_tokens: int
    n: int
    patience: float
    deadline_ms: int
    gateway: int

    @property
    def expected_text(self) -> str:
        """What each choice says if nothing ends it before."""
        return self.prompt[: self.max_tokens]


@dataclass(slots=True)
class Outcome:
    """What came of a wish, as its caller saw it."""

    wish: Wish
    status: int | None = None
    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    error: str = ""
    is_whole: bool = False


def wishes(chance: Random, num_gateways: int) -> Iterator[Wish]:
    """Requests without end, each way of ending as often as any other but finishing, oftener."""
    manners = [*Manner, Manner.FINISH, Manner.FINISH, Manner.FINISH]
    for number in itertools.count():
        length = chance.choice((4, 20, 60, 150))
        words = "".join(chance.choice(LETTERS) for _ in range(length))
        manner = chance.choice(manners)
        before_words = manner is Manner.LEAVE_BEFORE_WORDS
        yield Wish(
            number=number,
            manner=manner,
            prompt=f"{number:06} {words}",
            max_tokens=chance.choice((1, 10, 200)),
            n=chance.choice((1, 1, 1, 3)),
            patience=chance.uniform(0.0, 0.05) if before_words else chance.randint(1, 40),
            deadline_ms=chance.randint(5, 400) if manner is Manner.DEADLINE else 30_000,
            gateway=chance.randrange(num_gateways),
        )


class Callers:
    """Ask the gateways at `urls` with a key, each request on a connection of its own."""

    def __init__(self, urls: Sequence[str], api_key: str, model: str) -> None:
        self._urls = urls
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._model = model

    async def ask(self, wish: Wish) -> Outcome:
        """Carry out a wish. What breaks is part of the outcome."""
        outcome = Outcome(wish)
        with suppress(httpx.HTTPError, TimeoutError):
            if wish.manner is Manner.LEAVE_AT_ONCE:
                async with asyncio.timeout(wish.patience / 4000):
                    await self._stream(wish, outcome)
            else:
                async with asyncio.timeout(60):
                    await self._stream(wish, outcome)
        return outcome

    async def _stream(self, wish: Wish, outcome: Outcome) -> None:
        body = {
            "model": self._model,
            "prompt": wish.prompt,
            "max_tokens": wish.max_tokens,
            "n": wish.n,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {**self._headers, "x-deadline-ms": str(wish.deadline_ms)}
        url = f"{self._urls[wish.gateway]}/v1/completions"
        async with (
            httpx.AsyncClient(timeout=60) as client,
            self._patience_before_words(wish) as patience,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            patience.reschedule(None)
            outcome.status = response.status_code
            outcome.request_id = response.headers.get("x-request-id", "")[len(ID_PREFIX) :]
            if response.is_success:
                await self._read(response.aiter_lines(), outcome)
            else:
                outcome.error = (await response.aread()).decode()

    @staticmethod
    def _patience_before_words(wish: Wish) -> asyncio.Timeout:
        is_short = wish.manner is Manner.LEAVE_BEFORE_WORDS
        return asyncio.timeout(wish.patience if is_short else None)

    async def _read(self, lines: AsyncIterator[str], outcome: Outcome) -> None:
        wish, num_chunks = outcome.wish, 0
        async for line in lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                outcome.is_whole = True
                continue
            event = json.loads(line.removeprefix("data: "))
            self._note(event, outcome)
            if not event.get("choices"):
                continue  # Whoever is told a usage hears whether it was an error, too.
            num_chunks += 1
            if wish.manner is Manner.LEAVE_AMONG_WORDS and num_chunks >= wish.patience:
                return
            if wish.manner is Manner.LEAVE_AFTER_WORDS and self._has_all(outcome):
                return

    @staticmethod
    def _note(event: dict[str, Any], outcome: Outcome) -> None:
        if event.get("error"):
            outcome.error = str(event["error"].get("code"))
        for choice in event.get("choices", ()):
            index = choice["index"]
            outcome.texts[index] = outcome.texts.get(index, "") + choice["text"]
        if event.get("usage"):
            usage = event["usage"]
            outcome.usage = (usage["prompt_tokens"], usage["completion_tokens"])

    @staticmethod
    def _has_all(outcome: Outcome) -> bool:
        expected = outcome.wish.expected_text
        return len(outcome.texts) == outcome.wish.n and all(
            text == expected for text in outcome.texts.values()
        )
