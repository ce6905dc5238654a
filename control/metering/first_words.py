"""When readers were told the first words, beside what their requests' records say."""

from collections.abc import Mapping

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.identity.request_id import created_at_of

_NOTE = text(
    """
    UPDATE request_timings r SET told_s = t.told_s
    FROM unnest(CAST(:created_at AS timestamptz[]), CAST(:request_id AS text[]),
                CAST(:told_s AS float8[])) AS t (created_at, request_id, told_s)
    WHERE r.created_at = t.created_at AND r.request_id = t.request_id AND r.told_s IS NULL
    """
)


async def note_first_words(connection: AsyncConnection, told_s: Mapping[str, float]) -> None:
    """For each request: seconds from its first byte to the first words of its answer."""
    ids = sorted(told_s)
    await connection.execute(
        _NOTE,
        {
            "created_at": [created_at_of(request_id) for request_id in ids],
            "request_id": ids,
            "told_s": [told_s[request_id] for request_id in ids],
        },
    )
