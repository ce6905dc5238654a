"""What the processes say to each other through Redis, and the one codec for it.

Every message is small, typed and versioned. A message that cannot be read is for the dead
letters: the reader counts it and goes on.
"""

from dataclasses import dataclass

import msgspec

from engine.interface.generation_delta import Usage
from engine.interface.generation_request import GenerationRequest, PriorityClass

VERSION = b"1"
MAX_MESSAGE_BYTES = 16 * 2**20


class UnreadableMessage(ValueError):
    """The entry is not a message of a version this process speaks."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """What the dispatcher must know of a waiting request to place it.

    `max_kv_tokens` is what all sequences may come to together, `max_choice_tokens` what the
    longest of them may, `max_tokens` what each may say, `weight` is the tenant's in the fair
    queue. The last four are absent from entries of older gateways; such a request counts as long
    as it may become.
    """

    request_id: str
    tenant_id: str
    priority_class: PriorityClass
    weights_digest: str
    num_sequences: int
    max_kv_tokens: int
    arrival: float
    deadline_at: float
    cache_scope: str = ""
    max_tokens: int = 0
    max_choice_tokens: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Charge:
    """What a tenant was charged for a request when it was assigned, in units of service.

    The tenant's virtual time went from `time_before` to `time_after`.
    """

    tenant_id: str
    weight: float
    service: float
    time_before: float
    time_after: float


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that was charged has ended, and used this."""

    request_id: str
    charge: Charge
    usage: Usage


@dataclass(frozen=True, slots=True)
class Assignment:
    """A replica is to run this attempt of the request, on these weights and no others.

    `queued_at` and `assigned_at` are on the shared clock; dispatchers of older releases do not
    tell them.
    """

    request_id: str
    attempt: int
    weights_digest: str
    request: GenerationRequest
    queued_at: float | None = None
    assigned_at: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A replica is to stop the request, whatever its attempt, and end it with the error code.

    `asked_at` is on the shared clock.
    """

    request_id: str
    error: str
    asked_at: float = 0.0


InboxMessage = Assignment | Cancel

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerationRequest)
_entry_decoder = msgspec.msgpack.Decoder(QueueEntry)
_charge_decoder = msgspec.msgpack.Decoder(Charge)
_usage_decoder = msgspec.msgpack.Decoder(Usage)


def pack_request(request: GenerationRequest) -> bytes:
    """The request as the live hash and the inbox carry it."""
    return _encoder.encode(request)


def unpack_request(data: bytes) -> GenerationRequest:
    """Inverse of `pack_request`. Raises UnreadableMessage."""
    try:
        return _request_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise UnreadableMessage(f"request: {error}") from error


def pack_entry(entry: QueueEntry) -> bytes:
    """The header of a queued request."""
    return _encoder.encode(entry)


def unpack_entry(data: bytes) -> QueueEntry:
    """Inverse of `pack_entry`. Raises UnreadableMessage."""
    try:
        return _entry_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise UnreadableMessage(f"queue entry: {error}") from error


def pack_charge(charge: Charge) -> bytes:
    """The charge as the live hash carries it to the ending."""
    return _encoder.encode(charge)


def pack_usage(usage: Usage) -> bytes:
    """The usage that an ending tells the dispatcher."""
    return _encoder.encode(usage)


def read_ending(fields: dict[bytes, bytes]) -> Ending:
    """What one entry of the endings says. Raises UnreadableMessage."""
    try:
        return Ending(
            fields[b"id"].decode(),
            _charge_decoder.decode(fields[b"charge"]),
            _usage_decoder.decode(fields[b"usage"]),
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise UnreadableMessage(f"ending: {error!r}") from error


def read_inbox_message(fields: dict[bytes, bytes], entry_id: bytes = b"0-0") -> InboxMessage:
    """The message of one inbox entry, whose id says when it was written.

    Raises UnreadableMessage.
    """
    if sum(map(len, fields.values())) > MAX_MESSAGE_BYTES:
        raise UnreadableMessage(f"message is over {MAX_MESSAGE_BYTES} bytes")
    if fields.get(b"v") != VERSION:
        raise UnreadableMessage(f"version {fields.get(b'v')!r} is not {VERSION!r}")
    try:
        request_id = fields[b"id"].decode()
        if fields[b"kind"] == b"cancel":
            return Cancel(request_id, fields[b"error"].decode(), _written_at(entry_id))
        if fields[b"kind"] == b"assignment":
            weights_digest = fields[b"weights"].decode()
            request = unpack_request(fields[b"request"])
            queued = fields.get(b"queued")
            return Assignment(
                request_id,
                int(fields[b"attempt"]),
                weights_digest,
                request,
                queued_at=None if queued is None else _written_at(queued),
                assigned_at=_written_at(entry_id),
            )
    except (KeyError, ValueError) as error:
        raise UnreadableMessage(f"inbox entry: {error!r}") from error
    raise UnreadableMessage(f"kind {fields[b'kind']!r} is unknown")


def _written_at(entry_id: bytes) -> float:
    """When a stream's entry was written, in seconds of Redis's clock, to the millisecond."""
    return int(entry_id.partition(b"-")[0]) / 1000
