"""Names of everything in Redis. Redis is transport, never the record.

The braces are a Redis Cluster hash tag: all keys of one model share a slot, so each move of a
request is one atomic function call (`functions.lua`).

    {model}:queue:CLASS     stream   admitted requests waiting for the dispatcher, oldest first
    {model}:live:REQUEST    hash     the request until its end; no key means: refuse
    {model}:log:REQUEST     string   its delivered deltas, framed, in order
    {model}:open            set      ids of requests without an ending
    {model}:inbox:REPLICA   stream   Assignment and Cancel for one replica
    {model}:feed:FOLLOWER   stream   deltas of one engine step for one follower, in one entry
    {model}:replica:REPLICA string   what the replica last said of itself; expires with it
    {model}:replicas        set      replicas that may have said something
    {model}:serving:DIGEST  string   a replica served these weights less than a minute ago
    {model}:leader          string   the fencing token of the dispatcher in charge; expires
    {model}:clock           hash     virtual time of each tenant: the fair queue's memory
    {model}:endings         stream   what ended requests were charged and what they used, until the
                                     dispatcher has set the clock right
    {model}:unsettled       stream   settlements that wait for PostgreSQL
    {model}:dead            stream   messages nobody could read, newest kept
    {tenant}:bucket         hash     what a tenant may still use (`buckets.lua`)
    {tenant}:leases         zset     its open requests, by when their leases lapse
    follower:ID             string   a gateway or batch worker is alive; expires with it

Streams are never trimmed, except the feed and the dead letters: a full queue or inbox refuses.
"""

from dataclasses import dataclass

from engine.interface.generation_request import PriorityClass


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """The keys of one model."""

    model: str

    def queue(self, priority_class: PriorityClass) -> str:
        """Requests waiting in one class."""
        return f"{{{self.model}}}:queue:{priority_class}"

    def live(self, request_id: str) -> str:
        """A request from acceptance to its end."""
        return f"{{{self.model}}}:live:{request_id}"

    def log(self, request_id: str) -> str:
        """What was delivered of a request."""
        return f"{{{self.model}}}:log:{request_id}"

    @property
    def open(self) -> str:
        """Requests without an ending."""
        return f"{{{self.model}}}:open"

    def inbox(self, replica_id: str) -> str:
        """Orders for one replica."""
        return f"{{{self.model}}}:inbox:{replica_id}"

    def feed(self, follower_id: str) -> str:
        """Deltas for one follower."""
        return f"{{{self.model}}}:feed:{follower_id}"

    def replica(self, replica_id: str) -> str:
        """A replica's last snapshot."""
        return f"{{{self.model}}}:replica:{replica_id}"

    @property
    def replicas(self) -> str:
        """Ids of replicas that may be alive."""
        return f"{{{self.model}}}:replicas"

    def serving(self, weights_digest: str) -> str:
        """There while some replica serves these weights, and for a restart's time after."""
        return f"{{{self.model}}}:serving:{weights_digest}"

    @property
    def leader(self) -> str:
        """The dispatcher in charge."""
        return f"{{{self.model}}}:leader"

    @property
    def clock(self) -> str:
        """What each tenant was served, by its virtual time."""
        return f"{{{self.model}}}:clock"

    @property
    def endings(self) -> str:
        """Ended requests whose charge is to be corrected."""
        return f"{{{self.model}}}:endings"

    @property
    def unsettled(self) -> str:
        """Settlements of ended requests that the ledger does not have yet."""
        return f"{{{self.model}}}:unsettled"

    @property
    def dead(self) -> str:
        """Messages nobody could read."""
        return f"{{{self.model}}}:dead"


def follower_key(follower_id: str) -> str:
    """Alive while its owner renews it."""
    return f"follower:{follower_id}"
