"""The HTTP application around a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from api import accepted_requests, admin, batches, completions, files, health, models, openapi
from api.envelope import Envelope
from api.errors import install_error_handlers
from api.gateway import Gateway


def create_app(gateway: Gateway) -> FastAPI:
    """The app that serves the gateway; its lifespan is the gateway's.

    There is no documentation page, and the schema asks for a key like everything else: strangers
    see health and nothing more.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.gateway = gateway
    app.add_middleware(Envelope, mint_id=gateway.mint_request_id)
    install_error_handlers(app)
    for module in (health, models, completions, accepted_requests, files, batches, admin, openapi):
        app.include_router(module.router)
    return app
