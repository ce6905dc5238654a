"""Who a replica is: one life of one process, serving one version of one model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """`replica_id` is new with every start, so that orders to a dead one stay dead."""

    replica_id: str
    model: str
    version: str
    weights_digest: str
