"""POST /v1/chat/completions and POST /v1/completions.

The order keeps refusals cheap: key, size, body; then whether the call repeats another, whose
request it is given; then everything else (`api.completion_call`).
"""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.authentication import Caller
from api.body import read_json_body
from api.callers import InferenceCaller
from api.completion_call import CompletionCall
from api.gateway import gateway_of
from api.repeated_call import RepeatedCall
from api.repetition import repetition_of
from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.json_body import parse_object

LONG_BODY_BYTES = 64 * 1024

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, caller: InferenceCaller) -> Response:
    """Answer a conversation."""
    return await _answer(request, caller, ChatRequest)


@router.post("/v1/completions")
async def create_completion(request: Request, caller: InferenceCaller) -> Response:
    """Continue raw prompts."""
    return await _answer(request, caller, CompletionRequest)


async def _answer(
    request: Request, caller: Caller, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    gateway = gateway_of(request)
    data = await read_json_body(request, gateway.max_body_bytes)
    body = parse_object(data)
    fields = kind.parse(body)
    if len(data) > LONG_BODY_BYTES:
        # Not on the loop: what it means is written anew to be hashed.
        repetition = await asyncio.to_thread(repetition_of, request, body)
    else:
        repetition = repetition_of(request, body)
    call = CompletionCall(gateway, request, caller, fields, repetition)
    return RepeatedCall(call) if call.repetition.may_repeat else await call.new()
