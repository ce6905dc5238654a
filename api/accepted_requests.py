"""What became of a request: how it stands, its stream from any point on, and the end of it.

Any gateway answers, also for requests that another one accepted. A completion's id is its tenant's
own: another tenant's is answered as one that was never given out.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from redis.exceptions import RedisError
from starlette.responses import Response

from api.answer import answer_in, head_of
from api.authentication import Caller
from api.breakage import Breakage
from api.callers import InferenceCaller
from api.entrance import KnownRequest
from api.event_labels import EventLabels
from api.gateway import Gateway, gateway_of
from api.generation import GenerationResponse
from api.models import resolve
from api.resume_headers import last_event, resume_grace_s
from api.stored import reading
from control.admission.accepted import Accepted, read_accepted
from control.admission.progress import read_progress
from control.errors import NotFound, StoreUnavailable
from control.identity.request_id import created_at_of, is_request_id
from control.protocol.responses import CHAT, COMPLETION, ReplyShape, to_json, usage_object
from engine.interface.generation_delta import Usage

CANCEL_WAIT_S = 10.0
RETRY_AFTER_MS = 1000
MAX_OFFSET = 10**9

_STATUSES = {"finished": "completed", "cancelled": "cancelled", "failed": "failed"}

StartingAfter = Annotated[int | None, Query(ge=0, le=MAX_OFFSET)]

router = APIRouter()


@router.get("/v1/chat/completions/{completion_id}")
@router.get("/v1/completions/{completion_id}")
async def show(request: Request, completion_id: str, caller: InferenceCaller) -> Response:
    """How a request stands."""
    accepted = await _find(request, caller, completion_id)
    return await _status(gateway_of(request), completion_id, accepted)


@router.get("/v1/chat/completions/{completion_id}/stream")
@router.get("/v1/completions/{completion_id}/stream")
async def stream(
    request: Request,
    completion_id: str,
    caller: InferenceCaller,
    starting_after: StartingAfter = None,
) -> Response:
    """A request's events after the one named, or all; then whatever comes."""
    gateway = gateway_of(request)
    accepted = await _find(request, caller, completion_id)
    if accepted.form is None:
        raise _unknown()
    last = last_event(request, completion_id)
    after = starting_after if last is None else last
    grace_s = resume_grace_s(request, caller, accepted.form.grace_s)
    version = resolve(await gateway.registry.current(), accepted.pinned_name)
    text = await gateway.prompts.of(version)
    form = accepted.form.streamed()
    head = head_of(form, accepted.request_id, version)
    labels = EventLabels(head.completion_id, after)
    answer = answer_in(form, head, text, gateway, accepted.prompt_tokens, labels)
    entrance = KnownRequest(gateway, caller.tenant_id, accepted, after)
    breakage = Breakage(gateway.database, accepted.request_id, caller.key_id)
    return GenerationResponse(gateway, entrance, answer, breakage, grace_s)


@router.post("/v1/chat/completions/{completion_id}/cancel")
@router.post("/v1/completions/{completion_id}/cancel")
async def cancel(request: Request, completion_id: str, caller: InferenceCaller) -> Response:
    """Stop a request, and say what it came to. To ask again changes nothing."""
    gateway = gateway_of(request)
    accepted = await _find(request, caller, completion_id)
    if not accepted.has_ended:
        try:
            await _stop(gateway, accepted)
        except (RedisError, OSError) as error:
            raise _no_answer() from error
        accepted = await _find(request, caller, completion_id)
    return await _status(gateway, completion_id, accepted)


async def _find(request: Request, caller: Caller, completion_id: str) -> Accepted:
    """The caller's request. Raises NotFound."""
    shape = CHAT if request.scope["path"].startswith("/v1/chat/") else COMPLETION
    request_id = completion_id.removeprefix(shape.id_prefix)
    if shape.id_prefix + request_id != completion_id or not is_request_id(request_id):
        raise _unknown()
    async with reading(gateway_of(request).database) as connection:
        accepted = await read_accepted(connection, caller.tenant_id, request_id)
    if accepted is None or _shape_of(accepted) is not shape:
        raise _unknown()
    return accepted


async def _stop(gateway: Gateway, accepted: Accepted) -> None:
    """Cancel, and wait for the ending: it comes within two steps of the engine."""
    model, request_id = accepted.model, accepted.request_id
    async with gateway.follower.subscribe(model, request_id) as subscription:
        if not await gateway.follower.attach(subscription):
            return
        await gateway.follower.cancel(model, request_id)
        while True:
            delta = await subscription.next(CANCEL_WAIT_S)
            if delta is None or delta.is_last:
                return


async def _status(gateway: Gateway, completion_id: str, accepted: Accepted) -> Response:
    try:
        progress = await read_progress(gateway.redis, accepted)
    except (RedisError, OSError) as error:
        raise _no_answer() from error
    shape = _shape_of(accepted)
    body = {
        "id": completion_id,
        "object": f"{shape.whole_object}.status",
        "created": int(created_at_of(accepted.request_id).timestamp()),
        "model": accepted.pinned_name,
        "status": _STATUSES.get(accepted.state, progress.word),
        "usage": usage_object(accepted.usage or Usage(accepted.prompt_tokens, progress.num_tokens)),
        "queue_position": progress.queue_position,
        "predicted_start_at": None,
        "error_code": accepted.error,
    }
    return Response(to_json(body), media_type="application/json")


def _shape_of(accepted: Accepted) -> ReplyShape:
    return CHAT if accepted.endpoint.startswith("/v1/chat/") else COMPLETION


def _unknown() -> NotFound:
    return NotFound("There is no completion of this id here.")


def _no_answer() -> StoreUnavailable:
    return StoreUnavailable(
        "The request's progress cannot be read. Try again shortly.", retry_after_ms=RETRY_AFTER_MS
    )
