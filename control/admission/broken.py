"""Requests whose connection broke, and the repetitions that they went to.

SDKs repeat a call by themselves, under no key. Such a repetition is given what its own first call
made, and nobody else's: only a request whose connection is known to be broken is given away, to a
call of the same API key that means the same and says that it is a repetition, and only once.

A request of whose answer no byte was written is waste on the invoice, as long as nobody heard it.
"""

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of
from control.protocol.answer_form import unpack_form

_NOTE = text(
    """
    INSERT INTO broken_requests AS b (created_at, request_id, key_id, body_hash, was_heard)
    VALUES (:created_at, :request_id, :key_id, :body_hash, :was_heard)
    ON CONFLICT (created_at, request_id) DO UPDATE
    SET broken_at = now(), retried_by = NULL, body_hash = EXCLUDED.body_hash,
        was_heard = b.was_heard OR EXCLUDED.was_heard
    WHERE b.heard_at IS NULL
    """
)

_ORPHAN = text(
    """
    SELECT key_id, answer_form FROM requests
    WHERE created_at = :created_at AND request_id = :request_id
    """
)

_TAKE = text(
    """
    UPDATE broken_requests SET retried_by = :retried_by
    WHERE (created_at, request_id) = (
        SELECT created_at, request_id FROM broken_requests
        WHERE key_id = :key_id AND body_hash = :body_hash AND retried_by IS NULL
          AND broken_at > now() - make_interval(secs => :within_s)
        ORDER BY was_heard, broken_at LIMIT 1
        FOR UPDATE SKIP LOCKED)
    RETURNING request_id
    """
)

_HEARD = text(
    """
    UPDATE broken_requests SET heard_at = now()
    WHERE created_at = :created_at AND request_id = :request_id AND heard_at IS NULL
    """
)


async def note_broken(
    connection: AsyncConnection,
    request_id: str,
    key_id: str,
    body_hash: bytes | None,
    *,
    was_heard: bool,
) -> None:
    """Note that the request's connection broke.

    `body_hash` is None for a caller that is not known to repeat what breaks; `was_heard` says that
    something of the answer was written.
    """
    await connection.execute(
        _NOTE,
        {
            "created_at": created_at_of(request_id),
            "request_id": request_id,
            "key_id": key_id,
            "body_hash": body_hash,
            "was_heard": was_heard,
        },
    )


def note_orphan(connection: Connection, request_id: str) -> None:
    """Note that the gateway died to which the request's caller was connected.

    Of an answer that is told at its end, nothing was written then; of a stream, nobody knows how
    much, and it counts as heard.
    """
    key = {"created_at": created_at_of(request_id), "request_id": request_id}
    row = connection.execute(_ORPHAN, key).one_or_none()
    if row is None or row.answer_form is None or unpack_form(bytes(row.answer_form)).is_stream:
        return
    values = {**key, "key_id": row.key_id, "body_hash": None, "was_heard": False}
    connection.execute(_NOTE, values)


async def take_broken(
    connection: AsyncConnection, key_id: str, body_hash: bytes, within_s: float, retried_by: str
) -> str | None:
    """The id of the broken request that this repetition repeats, now given away; or None."""
    values = {
        "key_id": key_id,
        "body_hash": body_hash,
        "within_s": within_s,
        "retried_by": retried_by,
    }
    taken: str | None = (await connection.execute(_TAKE, values)).scalar_one_or_none()
    return taken


async def note_heard(connection: AsyncConnection, request_id: str) -> None:
    """Note that somebody is told the answer after all."""
    await connection.execute(
        _HEARD, {"created_at": created_at_of(request_id), "request_id": request_id}
    )
