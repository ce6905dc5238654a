"""One call of a generation endpoint, and the two things it can come to.

A new request: what can be told without encoding is checked first, then the prompt's tokens are
made, then the request is accepted or refused as a whole. Or one that was accepted before, which
costs no encoding: how it is told is kept, and this call says only whether as a stream.
"""

import asyncio
import time
from dataclasses import dataclass, replace

from fastapi import Request

from api.answer import answer_in, head_of
from api.authentication import Caller
from api.breakage import Breakage
from api.entrance import KnownRequest, NewRequest
from api.envelope import began_at, request_id_of
from api.event_labels import EventLabels
from api.gateway import Gateway
from api.generation import GenerationResponse
from api.models import resolve
from api.prompts import TokenIds, VersionText
from api.repetition import Repetition, endpoint_of
from api.resume_headers import (
    LAST_EVENT_ID,
    RESUME_GRACE,
    last_event,
    resume_grace_s,
    whole_number,
)
from control.admission.accepted import Accepted
from control.errors import Overloaded
from control.protocol.accepted_request import Order, build_request, check_early, reserve
from control.protocol.answer_form import Fields, form_of, pack_form
from control.protocol.completion_request import CompletionRequest
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import PriorityClass
from engine.text.prompt_encoder import ChatMessage
from engine.text.token_reader import TokenReader

DEFAULT_DEADLINE_MS = 600_000
MAX_DEADLINE_MS = 3_600_000
DEADLINE_HEADER = "x-deadline-ms"
ENCODE_LIMIT_S = 10.0
ENCODE_RETRY_MS = 5000

_REPLAYED = [(b"idempotent-replayed", b"true")]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One call. `fields` is its body."""

    gateway: Gateway
    http_request: Request
    caller: Caller
    fields: Fields
    repetition: Repetition

    @property
    def endpoint(self) -> str:
        """Method and path: where its key belongs."""
        return endpoint_of(self.http_request)

    async def new(
        self, replaces: str | None = None, adopted: Accepted | None = None
    ) -> GenerationResponse:
        """The answer to a new request.

        `replaces` is the request that its key stood for. `adopted` is one that was accepted and
        never queued: it is queued now, under its own id.
        """
        gateway, fields = self.gateway, self.fields
        self._check_no_last_event()
        arrival = gateway.clock.now() - (time.monotonic() - began_at(self.http_request.scope))
        name = fields.model if adopted is None else adopted.pinned_name
        version = resolve(await gateway.registry.current(), name)
        text = await gateway.prompts.of(version)
        check_early(fields, version, text.vocab_size)
        if fields.constraint is not None:
            await gateway.grammars.check(version, fields.constraint)
        request_id = request_id_of(self.http_request) if adopted is None else adopted.request_id
        order = Order(
            request_id=request_id,
            tenant_id=self.caller.tenant_id,
            key_id=self.caller.key_id,
            endpoint=self.http_request.scope["path"],
            priority_class=PriorityClass.INTERACTIVE,
            minted_seed=gateway.mint_seed(),
            arrival=arrival,
            deadline_at=arrival + _deadline_ms(self.http_request) / 1000,
        )
        prompts = await _encode(gateway, text, fields)
        request = build_request(fields, prompts, version, text.vocab_size, order)
        request = replace(request, keeps_output=self.repetition.key is not None)
        grace_s = resume_grace_s(self.http_request, self.caller)
        reader = TokenReader(text.tokenizer, request.text)
        form = replace(form_of(fields, request, reader), grace_s=grace_s)
        reservation = replace(
            reserve(fields, request, version, order),
            answer_form=pack_form(form),
            claim=self.repetition.claim(self.caller.tenant_id, self.endpoint, replaces),
        )
        head = head_of(form, request_id, version)
        labels = EventLabels(head.completion_id) if self._wants_ids else None
        answer = answer_in(form, head, text, gateway, request.num_prompt_tokens, labels)
        entrance = NewRequest(gateway, reservation, request)
        return GenerationResponse(gateway, entrance, answer, self._breakage(request_id), grace_s)

    async def known(self, accepted: Accepted) -> GenerationResponse:
        """The answer to a request that was accepted before."""
        gateway = self.gateway
        assert accepted.form is not None
        version = resolve(await gateway.registry.current(), accepted.pinned_name)
        text = await gateway.prompts.of(version)
        form = accepted.form.told_as(self.fields)
        head = head_of(form, accepted.request_id, version)
        after = last_event(self.http_request, head.completion_id)
        labels = EventLabels(head.completion_id, after) if self._wants_ids else None
        answer = answer_in(form, head, text, gateway, accepted.prompt_tokens, labels)
        entrance = KnownRequest(
            gateway, self.caller.tenant_id, accepted, after, is_kept=self.repetition.key is not None
        )
        return GenerationResponse(
            gateway,
            entrance,
            answer,
            self._breakage(accepted.request_id),
            resume_grace_s(self.http_request, self.caller, form.grace_s),
            _REPLAYED if accepted.has_ended else [],
        )

    @property
    def _wants_ids(self) -> bool:
        headers = self.http_request.headers
        is_resumable = RESUME_GRACE in headers or LAST_EVENT_ID in headers
        return is_resumable or self.repetition.key is not None

    def _breakage(self, request_id: str) -> Breakage:
        is_repeated = self.repetition.retry_count is not None
        shown = self.repetition.body_hash if is_repeated else None
        return Breakage(self.gateway.database, request_id, self.caller.key_id, shown)

    def _check_no_last_event(self) -> None:
        """A request that is made now has said nothing, and what it is to replace had not either."""
        named = self.http_request.headers.get(LAST_EVENT_ID, ":0")
        if whole_number(named.rpartition(":")[2]) != 0:
            raise InvalidRequest(
                f"Nothing was said yet that could be after {LAST_EVENT_ID}. A stream is asked for "
                "by its Idempotency-Key, or by its id: GET …/{id}/stream.",
                param=LAST_EVENT_ID,
            )


async def _encode(gateway: Gateway, text: VersionText, fields: Fields) -> list[TokenIds]:
    try:
        async with asyncio.timeout(ENCODE_LIMIT_S):
            return await _encode_whole(gateway, text, fields)
    except TimeoutError as error:
        raise Overloaded(
            f"The prompt could not be tokenised within {ENCODE_LIMIT_S:g} s. Try again later.",
            retry_after_ms=ENCODE_RETRY_MS,
        ) from error


async def _encode_whole(gateway: Gateway, text: VersionText, fields: Fields) -> list[TokenIds]:
    if isinstance(fields, CompletionRequest):
        return await gateway.prompts.encode_completion(text, fields.prompts)
    messages = [ChatMessage(m.role, m.text, m.name) for m in fields.messages]
    return await gateway.prompts.encode_chat(text, messages, fields.chat_options)


def _deadline_ms(request: Request) -> int:
    value = request.headers.get(DEADLINE_HEADER)
    if value is None:
        return DEFAULT_DEADLINE_MS
    is_number = value.isascii() and value.isdecimal() and len(value) <= 9
    if not is_number or not 1 <= int(value) <= MAX_DEADLINE_MS:
        raise InvalidRequest(
            f"{DEADLINE_HEADER} must be a whole number of milliseconds from 1 to "
            f"{MAX_DEADLINE_MS}.",
            param=DEADLINE_HEADER,
        )
    return int(value)
