"""POST /v1/chat/completions and POST /v1/completions.

The order keeps refusals cheap: key, size, body; then whether the call repeats another, whose
request it is given; then everything else (`api.completion_call`).
"""

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
    body = parse_object(await read_json_body(request, gateway.max_body_bytes))
    fields = kind.parse(body)
    call = CompletionCall(gateway, request, caller, fields, repetition_of(request, body))
    return RepeatedCall(call) if call.repetition.may_repeat else await call.new()
