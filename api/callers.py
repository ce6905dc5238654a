"""Route dependencies that name the caller and what the caller must be allowed to do.

A dependency belongs to a route, and routes are chosen by the path that the server parsed, so no
header can lead around it.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request

from api.authentication import Caller
from api.gateway import gateway_of


async def find_any_caller(request: Request) -> Caller:
    """A dependency that gives the caller, whatever the key allows."""
    return await gateway_of(request).authenticator.authenticate(request.scope)


def caller_with(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """A dependency that gives the caller, or refuses one whose key lacks the scope."""

    async def find_caller(request: Request) -> Caller:
        caller = await gateway_of(request).authenticator.authenticate(request.scope)
        caller.check_scope(scope)
        return caller

    return find_caller


InferenceCaller = Annotated[Caller, Depends(caller_with("inference"))]
BatchCaller = Annotated[Caller, Depends(caller_with("batch"))]
AdminCaller = Annotated[Caller, Depends(caller_with("admin"))]
AnyCaller = Annotated[Caller, Depends(find_any_caller)]
