"""GET /v1/models: every name that can be asked for."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.callers import InferenceCaller
from api.gateway import gateway_of
from control.errors import ModelNotFound
from control.protocol.responses import model_object, to_json
from control.registry.model_version import ModelVersion, Registry

MAX_SHOWN_NAME = 100

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request, _: InferenceCaller) -> Response:
    """All models: the name that follows rollouts, and each version's pinned name."""
    registry = await gateway_of(request).registry.current()
    names = sorted(registry.by_name)
    data = [model_object(name, registry.by_name[name]) for name in names]
    return Response(to_json({"object": "list", "data": data}), media_type="application/json")


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str, _: InferenceCaller) -> Response:
    """One model."""
    version = resolve(await gateway_of(request).registry.current(), name)
    return Response(to_json(model_object(name, version)), media_type="application/json")


def resolve(registry: Registry, name: str) -> ModelVersion:
    """The version that answers to the name. Raises ModelNotFound."""
    version = registry.resolve(name)
    if version is None:
        shown = ascii(name[:MAX_SHOWN_NAME])
        raise ModelNotFound(
            f"There is no model {shown} here. GET /v1/models lists those there are.", param="model"
        )
    return version
