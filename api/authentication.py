"""Who asks: a bearer key, looked up by its hash, remembered for a few seconds.

What is found and what is not are remembered apart and bounded, so a flood of invented keys
pushes no real one out. A source that offers many unknown keys gets no more queries of its own. It
may be shared with honest callers, so two kinds of keys are never refused for their neighbours'
failures: one that was valid before is looked up as ever, and one that is new here is refused with
a 429 but noted. All noted keys of all such sources are looked up together, in one query a second,
so a valid one passes when its caller tries again. All sources together have such a limit too, so
that many addresses cost the database no more than one does.

What is remembered is used for less than 5 s, whether or not the database can be asked again: a
revoked key, or that of a suspended tenant, is refused everywhere by then, and without a database
every key is refused with a 503. The decision is made from the headers alone: neither Host nor path
has a part in it.
"""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.types import Scope

from control.errors import (
    AuthenticationFailed,
    PermissionDenied,
    StoreUnavailable,
    TooManyFailures,
)
from control.identity.keys import FoundKey, find_keys, hash_key, is_well_formed

MAX_AGE_S = 4.0
MAX_REMEMBERED = 10_000
MAX_FAILURES = 50
FAILURES_PER_S = 5.0
MAX_FAILURES_OF_ALL = 1000
FAILURES_PER_S_OF_ALL = 100.0
MAX_NOTED = 5_000
JOINT_LOOKUP_INTERVAL_S = 1.0
QUERY_LIMIT_S = 5.0

_BEARER = b"Bearer "
_ALL = "all"
_IPV6_SITE_BITS = 64

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, and what the key may do.

    `resume_grace_s` is how long the key lets a request live on after its connection broke. An
    operator's key administers every tenant, if it has the scope `admin`.
    """

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    resume_grace_s: int = 0
    is_operator: bool = False
    expires_at: datetime | None = None

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDenied unless the key has the scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"This key lacks the scope {scope!r}.")


class NotesUses(Protocol):
    """Hears which keys are used."""

    def note(self, key_id: str) -> None:
        """The key was used now. Cheap: this is called for each request."""
        ...


class Authenticator:
    """Finds the caller of a request. `monotonic` is in seconds; `uses` hears of every success."""

    def __init__(
        self,
        database: AsyncEngine,
        pepper: bytes,
        monotonic: Callable[[], float] = time.monotonic,
        uses: NotesUses | None = None,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._monotonic = monotonic
        self._uses = uses
        self._known: _Recent[bytes, _Remembered] = _Recent(MAX_REMEMBERED)
        self._unknown: _Recent[bytes, float] = _Recent(MAX_REMEMBERED)
        self._noted: _Recent[bytes, None] = _Recent(MAX_NOTED)
        self._asking: dict[bytes, asyncio.Task[dict[bytes, FoundKey]]] = {}
        self._looked_up_jointly_at = float("-inf")
        self._failures = FailureLimiter(monotonic)
        self._failures_of_all = FailureLimiter(
            monotonic, MAX_FAILURES_OF_ALL, FAILURES_PER_S_OF_ALL
        )

    async def authenticate(self, scope: Scope) -> Caller:
        """The caller.

        Raises AuthenticationFailed, PermissionDenied, TooManyFailures or StoreUnavailable.
        """
        key_hash = hash_key(self._pepper, _bearer_key(scope["headers"]))
        source = source_of(scope)
        now = self._monotonic()
        known = self._known.get(key_hash)
        if known is not None and now < known.until:
            return self._caller(known.found)
        wait_ms = 0 if known is not None else self._wait_ms(source)
        missed_at = self._unknown.get(key_hash)
        if missed_at is not None and now - missed_at < MAX_AGE_S:
            found = None
        elif wait_ms:
            found = await self._find_jointly(key_hash, now)
        else:
            found = await self._find_once(key_hash, now)
        if found is not None:
            return self._caller(found)
        if wait_ms:
            raise TooManyFailures(
                f"Too many unknown keys came from this address. Try again in {wait_ms} ms.",
                retry_after_ms=wait_ms,
            )
        self._failures.note(source)
        self._failures_of_all.note(_ALL)
        raise AuthenticationFailed("The API key is unknown, has expired or was revoked.")

    def _wait_ms(self, source: str) -> int:
        return max(self._failures.wait_ms(source), self._failures_of_all.wait_ms(_ALL))

    def _caller(self, found: FoundKey) -> Caller:
        if found.is_suspended:
            raise PermissionDenied("The tenant that this key belongs to is suspended.")
        key = found.key
        if self._uses is not None:
            self._uses.note(key.key_id)
        return Caller(
            tenant_id=key.tenant_id,
            key_id=key.key_id,
            scopes=key.scopes,
            resume_grace_s=key.resume_grace_s,
            is_operator=found.is_operator,
            expires_at=key.expires_at,
        )

    async def _find_once(self, key_hash: bytes, now: float) -> FoundKey | None:
        """Look the key up, in one query for however many ask for it meanwhile. It goes on when
        one of them leaves.
        """
        asking = self._asking.get(key_hash)
        if asking is None:
            asking = asyncio.create_task(self._find([key_hash], now))
            self._asking[key_hash] = asking
            asking.add_done_callback(lambda done: self._forget_asking(key_hash, done))
        return (await asyncio.shield(asking)).get(key_hash)

    def _forget_asking(self, key_hash: bytes, done: "asyncio.Task[dict[bytes, FoundKey]]") -> None:
        del self._asking[key_hash]
        if not done.cancelled():
            done.exception()  # Looked at, in case that everybody has left.

    async def _find_jointly(self, key_hash: bytes, now: float) -> FoundKey | None:
        """Look up all noted keys if it is time; until then the answer is None."""
        self._noted.put(key_hash, None)
        if now - self._looked_up_jointly_at < JOINT_LOOKUP_INTERVAL_S:
            return None
        self._looked_up_jointly_at = now
        return (await self._find(self._noted.take_all(), now)).get(key_hash)

    async def _find(self, key_hashes: list[bytes], now: float) -> dict[bytes, FoundKey]:
        """Look up and remember, also what there is not."""
        try:
            async with asyncio.timeout(QUERY_LIMIT_S), self._database.connect() as connection:
                found = await find_keys(connection, key_hashes)
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(
                "Keys cannot be checked at the moment. Try again shortly.", retry_after_ms=1000
            ) from error
        for key_hash in key_hashes:
            key = found.get(key_hash)
            if key is not None:
                self._known.put(key_hash, _remembered(key, now))
            else:
                self._known.discard(key_hash)
                self._unknown.put(key_hash, now)
        return found


@dataclass(frozen=True, slots=True)
class _Remembered:
    """What was found, and until when on our monotonic clock it may be used."""

    found: FoundKey
    until: float


def _remembered(found: FoundKey, asked_at: float) -> _Remembered:
    """Counted from before the question was asked, so that a slow answer makes nothing older."""
    lives_s = MAX_AGE_S if found.lives_s is None else min(MAX_AGE_S, found.lives_s)
    return _Remembered(found, asked_at + lives_s)


def source_of(scope: Scope) -> str:
    """Whom failures are counted against: an IPv4 address, or the /64 of an IPv6 address, of
    which a single host has as many as it likes.
    """
    host: str = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _IPV6_SITE_BITS), strict=False))


class FailureLimiter:
    """A bucket of tolerated failures for each source, refilled slowly."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        max_failures: int = MAX_FAILURES,
        failures_per_s: float = FAILURES_PER_S,
    ) -> None:
        self._monotonic = monotonic
        self._max_failures = max_failures
        self._failures_per_s = failures_per_s
        self._failures: _Recent[str, tuple[float, float]] = _Recent(MAX_REMEMBERED)

    def wait_ms(self, source: str) -> int:
        """0, or how long to wait while the source has used up its failures: a second at least,
        for by then a noted key has had its look-up."""
        excess = self._level(source) - self._max_failures + 1
        if excess <= 0:
            return 0
        return int(1000 * max(excess / self._failures_per_s, JOINT_LOOKUP_INTERVAL_S)) + 1

    def note(self, source: str) -> None:
        """Count one failure."""
        self._failures.put(source, (self._level(source) + 1, self._monotonic()))

    def _level(self, source: str) -> float:
        level, at = self._failures.get(source) or (0.0, 0.0)
        return max(0.0, level - (self._monotonic() - at) * self._failures_per_s)


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
