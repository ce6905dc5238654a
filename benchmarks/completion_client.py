"""A small client of streamed /v1/completions, for any server that speaks OpenAI's protocol.

It shares the machine with what it measures, so it is made to cost little: asyncio streams, one
connection for each request, and JSON read only where it must be. Loopback only, so that a
mistyped address cannot load somebody's server.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LIMIT_S = 600.0
_MAX_LINE = 1 << 20
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class CompletionFailed(RuntimeError):
    """The server refused, broke off, or said an error; the message says what."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, for which model, with which key (empty: none)."""

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Raises ValueError if that is not this machine's loopback."""
        parts = urlsplit(self.base_url)
        if parts.scheme != "http" or parts.hostname not in _LOOPBACK or parts.port is None:
            raise ValueError(
                f"{self.base_url!r} is not http://127.0.0.1:PORT: only loopback is loaded"
            )
        return parts.hostname, parts.port


@dataclass(frozen=True, slots=True)
class CompletionTimes:
    """When a request was sent and each piece of its text came, in monotonic seconds."""

    sent_at: float
    text_at: list[float]
    ended_at: float
    num_tokens: int
    num_cached_tokens: int
    answer_id: str = ""

    @property
    def first_token_s(self) -> float:
        """From sending to the first piece of text."""
        return self.text_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece of text and the next."""
        return [later - at for at, later in zip(self.text_at, self.text_at[1:], strict=False)]


async def complete(endpoint: Endpoint, prompt: list[int], num_tokens: int) -> CompletionTimes:
    """Stream just so many tokens, greedily. Raises CompletionFailed."""
    host, port = endpoint.address
    try:
        async with asyncio.timeout(LIMIT_S):
            sent_at = time.perf_counter()
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE)
            try:
                writer.write(_request(endpoint, prompt, num_tokens))
                return await _times(reader, sent_at, num_tokens)
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError) as error:
        raise CompletionFailed(f"{endpoint.base_url}: {type(error).__name__} {error}") from error


def _request(endpoint: Endpoint, prompt: list[int], num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": endpoint.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    host, port = endpoint.address
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if endpoint.api_key:
        head.append(f"Authorization: Bearer {endpoint.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def _times(reader: asyncio.StreamReader, sent_at: float, asked: int) -> CompletionTimes:
    status = (await reader.readline()).split(b" ")
    if len(status) < 2 or status[1] != b"200":
        rest = await reader.read(2_000)
        raise CompletionFailed(f"HTTP {b' '.join(status).decode(errors='replace')!r} {rest!r}")
    text_at: list[float] = []
    usage: dict[str, object] = {}
    answer_id = ""
    # Chunk sizes and headers are lines as well; none of them begins like an event.
    while (line := await reader.readline()) and line.strip() != b"data: [DONE]":
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        if event.get("error"):
            raise CompletionFailed(str(event["error"]))
        usage = event.get("usage") or usage
        answer_id = str(event.get("id", ""))
        choices = event.get("choices") or [{}]
        if choices[0].get("text"):
            text_at.append(now)
    if not text_at:
        raise CompletionFailed("The stream held no text.")
    ended_at = time.perf_counter()
    said, cached = _counts(usage, len(text_at))
    if said != asked:
        raise CompletionFailed(f"{asked} tokens were asked for, {said} came.")
    return CompletionTimes(sent_at, text_at, ended_at, said, cached, answer_id)


def _counts(usage: dict[str, object], num_pieces: int) -> tuple[int, int]:
    """Tokens said, by the server's own count if it has one, and prompt tokens found cached."""
    said = usage.get("completion_tokens", num_pieces)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return (said if isinstance(said, int) else num_pieces), (
        cached if isinstance(cached, int) else 0
    )
