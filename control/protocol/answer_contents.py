"""What one answer says: words, and whatever else its caller asked to see.

The same piece-by-piece rule makes stream chunks and whole answers, so they cannot differ: a
piece is some tokens of a choice with their text, and a whole answer's choice is one piece.
The first piece of a choice carries what belongs before its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from control.protocol.answer_form import AnswerForm, Fields, form_of
from control.protocol.logprob_objects import (
    CompletionLogprobs,
    JsonObject,
    Reader,
    Text,
    TokenNames,
    chat_entries,
    prompt_entries,
)
from control.protocol.shown_fields import NO_DETAILS
from engine.interface.generation_request import GenerationRequest
from engine.interface.token_logprobs import TokenLogprob


class Piece(Protocol):
    """Some more of a choice, or all of it: a GenerationDelta or a FinishedChoice."""

    @property
    def choice(self) -> int:
        """Which choice."""

    @property
    def text(self) -> str:
        """Its words."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per token, if asked for."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per prompt token but the first, in a choice's first piece, if asked for."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is shown of a piece: its text, and the members of its choice beside the text.

    `says_something` is False for a piece that a stream need not send.
    """

    text: str
    members: JsonObject
    says_something: bool


class AnswerContents:
    """Shows the pieces of one request's answer, each once and in the order of their choice."""

    def __init__(self, form: AnswerForm, reader: Reader) -> None:
        self._form = form
        self._details = form.details
        self._reader = reader
        self._is_chat = form.is_chat
        self._names = TokenNames(reader, by_id=form.details.names_by_id)
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}

    @property
    def is_detailed(self) -> bool:
        """Whether more is told than words."""
        return self._details != NO_DETAILS

    @property
    def opening_members(self) -> JsonObject:
        """Members of a chat's answer itself that are known from the start."""
        if not (self._is_chat and self._details.token_ids):
            return {}
        return {"prompt_token_ids": self._form.prompts[0]}

    def members_of_all(self, pieces: Sequence[Piece]) -> JsonObject:
        """Members of a chat's whole answer, which has one prompt, that are not a choice's."""
        members = self.opening_members
        if self._is_chat and pieces and self._details.num_prompt_logprobs is not None:
            members["prompt_logprobs"] = self._prompt_logprobs(pieces[0])
        return members

    def show(self, piece: Piece) -> Shown:
        """The piece as the caller wants it."""
        details = self._details
        if details == NO_DETAILS:
            return Shown(piece.text, {}, bool(piece.text))
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        before = self._echo(piece) if is_first and details.echo else ""
        members: JsonObject = {}
        if details.num_logprobs is not None:
            members["logprobs"] = (
                self._chat_logprobs(piece)
                if self._is_chat
                else self._completion_logprobs(piece, before, is_first=is_first)
            )
        if details.token_ids:
            members["token_ids"] = piece.token_ids
        if is_first and not self._is_chat:
            members |= self._prompt_members(piece)
        has_members = bool(members) and (is_first or bool(piece.token_ids))
        return Shown(before + piece.text, members, bool(before or piece.text) or has_members)

    def _echo(self, piece: Piece) -> str:
        return self._form.prompt_texts[piece.choice // self._form.n]

    def _prompt_members(self, piece: Piece) -> JsonObject:
        members: JsonObject = {}
        if self._details.token_ids:
            members["prompt_token_ids"] = self._form.prompt_of(piece.choice)
        if self._details.num_prompt_logprobs is not None:
            members["prompt_logprobs"] = self._prompt_logprobs(piece)
        return members

    def _prompt_logprobs(self, piece: Piece) -> list[JsonObject | None]:
        num_top = self._details.num_prompt_logprobs
        assert num_top is not None
        prompt = self._form.prompt_of(piece.choice)
        return prompt_entries(self._reader, prompt, self._prompt_scores(piece), num_top)

    def _prompt_scores(self, piece: Piece) -> Sequence[TokenLogprob | None]:
        """One entry per prompt token: none of the first, nor of a prompt that was never begun."""
        num_scored = len(self._form.prompt_of(piece.choice)) - 1
        return (None, *(piece.prompt_logprobs or (None,) * num_scored))

    def _chat_logprobs(self, piece: Piece) -> JsonObject:
        entries = chat_entries(self._names, piece.token_ids, piece.logprobs or ())
        return {"content": entries, "refusal": None}

    def _completion_logprobs(self, piece: Piece, before: str, *, is_first: bool) -> JsonObject:
        logprobs = CompletionLogprobs(self._names, self._details.num_logprobs or 0)
        if is_first and self._details.echo:
            prompt = self._form.prompt_of(piece.choice)
            offsets = _Offsets(self._reader.prompt(), 0).of(prompt)
            scores = self._prompt_scores(piece)
            logprobs.add(prompt, scores, [min(offset, len(before)) for offset in offsets])
        if is_first:
            self._offsets[piece.choice] = _Offsets(self._reader.answer(), len(before))
        offsets = self._offsets[piece.choice].of(piece.token_ids)
        logprobs.add(piece.token_ids, piece.logprobs or (), offsets)
        return logprobs.as_object()


class _Offsets:
    """Where each token begins: in characters, a part of one counting as that one's beginning."""

    def __init__(self, text: Text, start: int) -> None:
        self._text = text
        self._next = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The places of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._text.push((token_id,)))
        return offsets


def contents_of(fields: Fields, request: GenerationRequest, reader: Reader) -> AnswerContents:
    """The contents of the answer to a request, valid by its own law, that was made of `fields`."""
    return AnswerContents(form_of(fields, request, reader), reader)
