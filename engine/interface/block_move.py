"""One block's worth of KV that changes its place before a step computes."""

from enum import StrEnum
from typing import NamedTuple


class MoveKind(StrEnum):
    """Between which places: the device's block pool and the host's."""

    COPY = "copy"  # device block -> device block
    OFFLOAD = "offload"  # device block -> host block
    LOAD = "load"  # host block -> device block


class BlockMove(NamedTuple):
    """Move the whole block `source` to `destination`; the source may be overwritten afterwards.

    The moves of a step happen in their order, each on what the ones before left behind, and
    all of them before the step writes any KV of its own.
    """

    kind: MoveKind
    source: int
    destination: int
