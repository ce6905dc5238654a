"""The leader's round over all open requests of a model: the dead, the orphaned, the half-ended.

A request whose replica went silent is queued again (once: a request that killed two replicas
ends), one that nobody follows any more is cancelled, and one whose end was begun by a process
that died is ended.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import redis
from sqlalchemy import Engine

from control.admission.broken import note_orphan
from control.admission.bucket import renew
from control.faults import fault_point
from control.metering.ending import end_request
from control.routing.snapshot_store import read_snapshots, retire
from control.streams.follower import RENEW_S
from control.streams.functions import invoke, lapse, requeue
from control.streams.keys import ModelKeys, follower_key
from control.streams.messages import unpack_entry

MAX_FAILURES = 1
ORPHAN_GRACE_S = RENEW_S + 1.0
# A third of a lease: two rounds may fail.
RENEW_LEASES_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Open:
    request_id: str
    replica_id: str
    followers: str
    failures: int
    ending: str
    is_queued: bool


class Sweep:
    """Looks after open requests on behalf of the leader that holds `token`."""

    def __init__(
        self,
        client: redis.Redis,
        database: Engine,
        keys: ModelKeys,
        token: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._database = database
        self._keys = keys
        self._token = token
        self._monotonic = monotonic
        self._orphaned_at: dict[str, float] = {}
        self._renewed_at = -RENEW_LEASES_S

    def run(self) -> None:
        """One round."""
        open_requests = self._read_open()
        still_open = {request.request_id for request in open_requests}
        self._orphaned_at = {k: v for k, v in self._orphaned_at.items() if k in still_open}
        living, silent = read_snapshots(self._client, self._keys)
        followers = self._living_followers(open_requests)
        for request in open_requests:
            if request.replica_id and request.replica_id not in living:
                self._take_from_dead(request)
            elif request.ending and not request.replica_id and not request.is_queued:
                self._end(request, request.ending)
            elif self._is_orphaned(request, followers):
                self._lapse(request)
        self._renew(open_requests)
        for replica_id in silent:
            log.warning("replica %s is gone", replica_id)
            retire(self._client, self._keys, replica_id)

    def _renew(self, requests: Iterable[_Open]) -> None:
        """Keep the tenants' places for what is open, now and then."""
        if self._monotonic() - self._renewed_at < RENEW_LEASES_S:
            return
        self._renewed_at = self._monotonic()
        request_ids = [request.request_id for request in requests if not request.ending]
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hget(self._keys.live(request_id), "header")
        by_tenant: dict[str, list[str]] = {}
        for request_id, header in zip(request_ids, pipeline.execute(), strict=True):
            if header is not None:
                tenant_id = unpack_entry(header).tenant_id
                by_tenant.setdefault(tenant_id, []).append(request_id)
        for tenant_id, request_ids in by_tenant.items():
            invoke(self._client, renew(tenant_id, request_ids))

    def _is_orphaned(self, request: _Open, followers: frozenset[str]) -> bool:
        """True once nobody has followed the request for a while.

        A while, because a server that lost its data has lost the followers' leases too, until
        each of them renews its own. One whose last follower left has a grace of its own, which
        `lapse` looks after.
        """
        if followers.intersection(request.followers.split()):
            self._orphaned_at.pop(request.request_id, None)
            return False
        if not request.followers:
            return True
        orphaned_at = self._orphaned_at.setdefault(request.request_id, self._monotonic())
        return self._monotonic() - orphaned_at >= ORPHAN_GRACE_S

    def _lapse(self, request: _Open) -> None:
        if request.followers and not request.ending:
            with self._database.begin() as connection:
                note_orphan(connection, request.request_id)
        invoke(self._client, lapse(self._keys, request.request_id, request.followers))

    def _take_from_dead(self, request: _Open) -> None:
        if request.failures >= MAX_FAILURES:
            self._end(request, "replica_lost")
            return
        fault_point("sweep.before_requeue")
        call = requeue(self._keys, self._token, request.request_id, request.replica_id, 1)
        reply = invoke(self._client, call)
        if reply == b"cancelled":
            self._end(request, request.ending or "cancelled")

    def _end(self, request: _Open, error: str) -> None:
        end_request(self._client, self._database, self._keys, request.request_id, error)

    def _read_open(self) -> list[_Open]:
        members = cast("set[bytes]", self._client.smembers(self._keys.open))
        request_ids = sorted(member.decode() for member in members)
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hmget(
                self._keys.live(request_id),
                ["replica", "followers", "failures", "cancelled", "entry"],
            )
        found = []
        for request_id, fields in zip(request_ids, pipeline.execute(), strict=True):
            if fields[0] is None:
                # Redis dropped it past every deadline; its row is maintenance's to expire.
                self._client.srem(self._keys.open, request_id)
                continue
            replica, followers, failures, ending, entry = (
                (field or b"").decode() for field in fields
            )
            found.append(
                _Open(
                    request_id,
                    replica,
                    followers,
                    int(failures),
                    ending,
                    bool(entry),
                )
            )
        return found

    def _living_followers(self, requests: Iterable[_Open]) -> frozenset[str]:
        names = sorted({name for request in requests for name in request.followers.split()})
        if not names:
            return frozenset()
        found = cast("list[bytes | None]", self._client.mget([follower_key(n) for n in names]))
        return frozenset(name for name, data in zip(names, found, strict=True) if data)
