"""For load balancers and supervisors; needs no key and tells nothing but names of checks."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.gateway import gateway_of
from control.protocol.responses import to_json

router = APIRouter()


@router.get("/health/live")
async def live() -> Response:
    """The process answers."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """A request that came now would be served."""
    gateway = gateway_of(request)
    checks = await gateway.readiness.checks()
    is_ready = all(checks.values()) and not gateway.drain.is_over
    body = {
        "status": "ok" if is_ready else "unavailable",
        "checks": {name: "ok" if holds else "failing" for name, holds in checks.items()},
    }
    return Response(to_json(body), 200 if is_ready else 503, media_type="application/json")
