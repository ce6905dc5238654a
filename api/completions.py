"""POST /v1/chat/completions and POST /v1/completions.

The order keeps refusals cheap: key, size, body, model, everything that can be told without
encoding; then the prompt's tokens; then the request is accepted or refused as a whole.
"""

import asyncio
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.answer import answer_in, head_of
from api.authentication import Caller
from api.body import read_json_body
from api.callers import InferenceCaller
from api.entrance import NewRequest
from api.envelope import request_id_of
from api.event_labels import EventLabels
from api.gateway import Gateway, gateway_of
from api.generation import GenerationResponse
from api.models import resolve
from api.prompts import TokenIds, VersionText
from api.resume_headers import LAST_EVENT_ID, RESUME_GRACE, resume_grace_s
from control.errors import Overloaded
from control.protocol.accepted_request import Order, build_request, check_early, reserve
from control.protocol.answer_form import Fields, form_of, pack_form
from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.json_body import parse_object
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import PriorityClass
from engine.text.prompt_encoder import ChatMessage
from engine.text.token_reader import TokenReader

DEFAULT_DEADLINE_MS = 600_000
MAX_DEADLINE_MS = 3_600_000
DEADLINE_HEADER = "x-deadline-ms"
ENCODE_LIMIT_S = 10.0
ENCODE_RETRY_MS = 5000

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, caller: InferenceCaller) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(request)
    body = await read_json_body(request, gateway.max_body_bytes)
    return await _answer(request, caller, ChatRequest.parse(parse_object(body)))


@router.post("/v1/completions")
async def create_completion(request: Request, caller: InferenceCaller) -> Response:
    """Continue raw prompts."""
    gateway = gateway_of(request)
    body = await read_json_body(request, gateway.max_body_bytes)
    return await _answer(request, caller, CompletionRequest.parse(parse_object(body)))


async def _answer(http_request: Request, caller: Caller, fields: Fields) -> Response:
    gateway = gateway_of(http_request)
    grace_s = resume_grace_s(http_request, caller)
    arrival = gateway.clock.now()
    version = resolve(await gateway.registry.current(), fields.model)
    text = await gateway.prompts.of(version)
    check_early(fields, version, text.vocab_size)
    if fields.constraint is not None:
        await gateway.grammars.check(version, fields.constraint)
    order = Order(
        request_id=request_id_of(http_request),
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        endpoint=http_request.scope["path"],
        priority_class=PriorityClass.INTERACTIVE,
        minted_seed=gateway.mint_seed(),
        arrival=arrival,
        deadline_at=arrival + _deadline_ms(http_request) / 1000,
    )
    prompts = await _encode(gateway, text, fields)
    request = build_request(fields, prompts, version, text.vocab_size, order)
    reader = TokenReader(text.tokenizer, request.text)
    form = replace(form_of(fields, request, reader), grace_s=grace_s)
    head = head_of(form, request.request_id, version)
    reservation = replace(reserve(fields, request, version, order), answer_form=pack_form(form))
    wants_ids = RESUME_GRACE in http_request.headers or LAST_EVENT_ID in http_request.headers
    labels = EventLabels(head.completion_id) if wants_ids else None
    answer = answer_in(form, head, text, gateway, request.num_prompt_tokens, labels)
    entrance = NewRequest(gateway, reservation, request)
    return GenerationResponse(gateway, entrance, answer, grace_s)


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
