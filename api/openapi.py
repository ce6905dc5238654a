"""GET /openapi.json: what is served here, for programs that write clients and tests.

Whoever has a key may read it; strangers see health and nothing else. The bodies are read by hand
(strictly, and within limits), so their schemas are those of the request models, less the fields
that are known only to be refused.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response
from starlette.routing import BaseRoute

from api.admin_bodies import BODIES as ADMIN_BODIES
from api.callers import AnyCaller
from control.batches.batch_request import BatchRequest
from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.responses import to_json
from control.protocol.strict_model import StrictModel
from engine.interface.sampling_params import RANGES, WHOLE_RANGES

VERSION = "1"

_DEFINITIONS = "#/components/schemas/"
_BODIES: dict[tuple[str, str], type[StrictModel]] = {
    ("/v1/chat/completions", "post"): ChatRequest,
    ("/v1/completions", "post"): CompletionRequest,
    ("/v1/batches", "post"): BatchRequest,
    **ADMIN_BODIES,
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

router = APIRouter()


@router.get("/openapi.json")
async def show_openapi(request: Request, _: AnyCaller) -> Response:
    """This description."""
    return Response(to_json(openapi(request.app.routes)), media_type="application/json")


def openapi(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The description of these routes, in OpenAPI 3.1."""
    described = get_openapi(title="Headrace", version=VERSION, routes=routes)
    schemas: dict[str, Any] = {"Error": _ERROR}
    for (path, method), model in _BODIES.items():
        schemas |= _definitions(model)
        body = {"application/json": {"schema": {"$ref": _DEFINITIONS + model.__name__}}}
        described["paths"][path][method]["requestBody"] = {"required": True, "content": body}
    form = {"multipart/form-data": {"schema": _UPLOAD}}
    described["paths"]["/v1/files"]["post"]["requestBody"] = {"required": True, "content": form}
    failure = {
        "description": "Refused or failed: the error object says why.",
        "content": {"application/json": {"schema": {"$ref": _DEFINITIONS + "Error"}}},
    }
    for path, methods in described["paths"].items():
        for operation in methods.values():
            # What the framework says of refusals is not what is sent.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failure
            if not path.startswith("/health/"):
                operation["security"] = [{"key": []}]
    described["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return described


def _definitions(model: type[StrictModel]) -> dict[str, Any]:
    """The model's schema and those that it refers to, by name."""
    schema = model.model_json_schema(ref_template=_DEFINITIONS + "{model}")
    found = {**schema.pop("$defs", {}), model.__name__: schema}
    served = {name: _without_refused(definition) for name, definition in found.items()}
    for name, (low, high) in {**RANGES, **WHOLE_RANGES}.items():
        # Chat's `logprobs` is yes or no.
        for option in served[model.__name__]["properties"].get(name, {}).get("anyOf", ()):
            if option["type"] in ("number", "integer"):
                option |= {"minimum": low, "maximum": high}
    return served


def _without_refused(definition: dict[str, Any]) -> dict[str, Any]:
    """A field of any type is one of which only the values are accepted that mean nothing."""
    definition = deepcopy(definition)
    properties = definition.get("properties", {})
    definition["properties"] = {
        name: schema
        for name, schema in properties.items()
        if schema.keys() - {"title", "default"} or name in definition.get("required", ())
    }
    return definition
