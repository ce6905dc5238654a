"""Who asks: a bearer key, looked up by its hash, remembered for a few seconds.

What is found and what is not are remembered apart and bounded, so a flood of invented keys
pushes no real one out. A source that offers many unknown keys gets no more queries of its own. It
may be shared with honest callers, so two kinds of keys are never refused for their neighbours'
failures: one that was valid before is looked up as ever, and one that is new here is refused with
a 429 but noted. All noted keys of all such sources are looked up together, in one query a second,
so a valid one passes when its caller tries again. The decision is made from the headers alone:
neither Host nor path has a part in it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.types import Scope

from control.errors import (
    AuthenticationFailed,
    PermissionDenied,
    StoreUnavailable,
    TooManyFailures,
)
from control.identity.keys import ApiKey, find_keys, hash_key, is_well_formed

MAX_AGE_S = 4.0
MAX_REMEMBERED = 10_000
MAX_FAILURES = 50
FAILURES_PER_S = 5.0
MAX_NOTED = 5_000
JOINT_LOOKUP_INTERVAL_S = 1.0
QUERY_LIMIT_S = 5.0

_BEARER = b"Bearer "

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, and what the key may do."""

    tenant_id: str
    key_id: str
    scopes: frozenset[str]

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDenied unless the key has the scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"This key lacks the scope {scope!r}.")


class Authenticator:
    """Finds the caller of a request. `monotonic` is in seconds."""

    def __init__(
        self,
        database: AsyncEngine,
        pepper: bytes,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._monotonic = monotonic
        self._known: _Recent[bytes, tuple[ApiKey, float]] = _Recent(MAX_REMEMBERED)
        self._unknown: _Recent[bytes, float] = _Recent(MAX_REMEMBERED)
        self._noted: _Recent[bytes, None] = _Recent(MAX_NOTED)
        self._looked_up_jointly_at = float("-inf")
        self._failures = FailureLimiter(monotonic)

    async def authenticate(self, scope: Scope) -> Caller:
        """The caller. Raises AuthenticationFailed, TooManyFailures or StoreUnavailable."""
        key_hash = hash_key(self._pepper, _bearer_key(scope["headers"]))
        source = (scope.get("client") or ("",))[0]
        now = self._monotonic()
        known = self._known.get(key_hash)
        if known is not None and now - known[1] < MAX_AGE_S:
            return _caller(known[0])
        wait_ms = 0 if known is not None else self._failures.wait_ms(source)
        missed_at = self._unknown.get(key_hash)
        if missed_at is not None and now - missed_at < MAX_AGE_S:
            key = None
        elif wait_ms:
            key = await self._find_jointly(key_hash, now)
        else:
            key = (await self._find([key_hash], now)).get(key_hash)
        if key is not None:
            return _caller(key)
        if wait_ms:
            raise TooManyFailures(
                f"Too many unknown keys came from this address. Try again in {wait_ms} ms.",
                retry_after_ms=wait_ms,
            )
        self._failures.note(source)
        raise AuthenticationFailed("The API key is unknown or was revoked.")

    async def _find_jointly(self, key_hash: bytes, now: float) -> ApiKey | None:
        """Look up all noted keys if it is time; until then the answer is None."""
        self._noted.put(key_hash, None)
        if now - self._looked_up_jointly_at < JOINT_LOOKUP_INTERVAL_S:
            return None
        self._looked_up_jointly_at = now
        return (await self._find(self._noted.take_all(), now)).get(key_hash)

    async def _find(self, key_hashes: list[bytes], now: float) -> dict[bytes, ApiKey]:
        """Look up and remember, also what there is not."""
        try:
            async with asyncio.timeout(QUERY_LIMIT_S), self._database.connect() as connection:
                found = await find_keys(connection, key_hashes)
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(
                "Keys cannot be checked at the moment. Try again shortly.", retry_after_ms=1000
            ) from error
        for key_hash in key_hashes:
            if key_hash in found:
                self._known.put(key_hash, (found[key_hash], now))
            else:
                self._known.discard(key_hash)
                self._unknown.put(key_hash, now)
        return found


class FailureLimiter:
    """A bucket of tolerated failures for each source, refilled slowly."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._failures: _Recent[str, tuple[float, float]] = _Recent(MAX_REMEMBERED)

    def wait_ms(self, source: str) -> int:
        """0, or how long to wait while the source has used up its failures: a second at least,
        for by then a noted key has had its look-up."""
        excess = self._level(source) - MAX_FAILURES + 1
        if excess <= 0:
            return 0
        return int(1000 * max(excess / FAILURES_PER_S, JOINT_LOOKUP_INTERVAL_S)) + 1

    def note(self, source: str) -> None:
        """Count one failure."""
        self._failures.put(source, (self._level(source) + 1, self._monotonic()))

    def _level(self, source: str) -> float:
        level, at = self._failures.get(source) or (0.0, 0.0)
        return max(0.0, level - (self._monotonic() - at) * FAILURES_PER_S)


class _Recent(Generic[K, V]):
    """The values put last, up to a number."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._max_values:
            self._values.popitem(last=False)

    def discard(self, key: K) -> None:
        self._values.pop(key, None)

    def take_all(self) -> list[K]:
        keys = list(self._values)
        self._values.clear()
        return keys


def _bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The one key that the headers hold. Raises AuthenticationFailed for anything unclear."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        raise AuthenticationFailed("Send your key as: Authorization: Bearer hr-…")
    key = values[0].removeprefix(_BEARER).decode("latin-1")
    if len(values) > 1 or not values[0].startswith(_BEARER):
        raise AuthenticationFailed("The Authorization header must be: Bearer, a space, one key.")
    if not is_well_formed(key):
        raise AuthenticationFailed("The API key is none of this service's: they begin with hr-.")
    return key


def _caller(key: ApiKey) -> Caller:
    return Caller(key.tenant_id, key.key_id, key.scopes)
