"""Logprobs as JSON, in the three shapes that clients know.

A token is told by its text and, in chats, by its bytes. One that is only a part of a character
has no text; its bytes are then written out as OpenAI does: `\\xe4\\xb8` in chats and
`bytes:\\xe4\\xb8` in completions.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.interface.token_logprobs import TokenLogprob

JsonObject = dict[str, object]


class Text(Protocol):
    """Tokens becoming text, as they come."""

    def push(self, token_ids: Iterable[int], /) -> str:
        """The text that is certain once these tokens have come."""


class Reader(Protocol):
    """What there is to know of a model's tokens; see `engine.text.token_reader`."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of one token."""

    def answer(self) -> Text:
        """A reader of one choice's output."""

    def prompt(self) -> Text:
        """A reader of one prompt."""

    def prompt_text(self, token_ids: Iterable[int], /) -> str:
        """The text of a whole prompt."""


class TokenNames:
    """What tokens are called in logprobs; `by_id` calls them "token_id:7" instead."""

    def __init__(self, reader: Reader, *, by_id: bool) -> None:
        self._reader = reader
        self._by_id = by_id

    def in_chat(self, token_id: int) -> JsonObject:
        """Name and bytes."""
        data = self._reader.token_bytes(token_id)
        name = f"token_id:{token_id}" if self._by_id else _text_or(data, "")
        return {"token": name, "bytes": list(data)}

    def in_completion(self, token_id: int) -> str:
        """The name alone."""
        if self._by_id:
            return f"token_id:{token_id}"
        return _text_or(self._reader.token_bytes(token_id), "bytes:")


def chat_entries(
    names: TokenNames, token_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> list[JsonObject]:
    """The items of `logprobs.content`, one per token."""
    return [
        {
            **_chat_entry(names, token_id, entry.logprob),
            "top_logprobs": [
                _chat_entry(names, top_id, logprob)
                for top_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


class CompletionLogprobs:
    """The older shape, four parallel lists, for some tokens of one choice.

    `text_offset` says where in the choice's text a token begins. The first token of a prompt has
    no logprob, since nothing stands before it.
    """

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        offsets: Sequence[int],
    ) -> None:
        """More tokens, what is known of each, and where each begins."""
        for token_id, entry, offset in zip(token_ids, entries, offsets, strict=True):
            name = self._names.in_completion(token_id)
            self._tokens.append(name)
            self._logprobs.append(None if entry is None else entry.logprob)
            self._tops.append(None if entry is None else self._top(name, entry))
            self._offsets.append(offset)

    def as_object(self) -> JsonObject:
        """The lists under their names."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _top(self, name: str, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the token itself. Of two with one name the likelier stays."""
        top: dict[str, float] = {}
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
        for top_id, logprob in likeliest[: self._num_top]:
            top.setdefault(self._names.in_completion(top_id), logprob)
        top.setdefault(name, entry.logprob)
        return top


def prompt_entries(
    reader: Reader,
    prompt: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    num_top: int,
) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token ids, or null if it has no score.

    The rank of a token that is not among the likeliest is not known, and null.
    """
    told: list[JsonObject | None] = []
    for token_id, entry in zip(prompt, entries, strict=True):
        if entry is None:
            told.append(None)
            continue
        top = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(top, start=1)}
        logprobs = {token_id: entry.logprob, **dict(top)}
        told.append(
            {
                str(known_id): {
                    "logprob": logprob,
                    "rank": ranks.get(known_id),
                    "decoded_token": reader.token_bytes(known_id).decode(errors="replace"),
                }
                for known_id, logprob in logprobs.items()
            }
        )
    return told


def _chat_entry(names: TokenNames, token_id: int, logprob: float) -> JsonObject:
    return {**names.in_chat(token_id), "logprob": logprob}


def _text_or(data: bytes, prefix: str) -> str:
    """The text, or the prefix and every byte written out when it is no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
