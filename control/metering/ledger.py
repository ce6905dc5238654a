"""What the ledger says, read for a comparison."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, text

from control.identity.request_id import created_at_of
from control.metering.balance import Balance, balance
from control.metering.settlement import Waste, WasteReason
from control.metering.step_log import read_step_logs

PAGE = 10_000


@dataclass(frozen=True, slots=True)
class Violation:
    """A law that a row breaks; the view `invariant_violations` must be empty."""

    law: str
    request_id: str
    detail: str


def compare(
    connection: Connection, step_logs: Path, request_ids: Collection[str] | None = None
) -> Balance:
    """The ledger against the step logs of this folder, for these requests or for all."""
    # Whoever has ended when the ledger is read has written all it ever will by the second reading.
    if request_ids is None:
        request_ids = {attempt.request_id for attempt in read_step_logs(step_logs)}
    asked = frozenset(request_ids)
    billed, waste = read_billed(connection, asked), read_waste(connection, asked)
    produced = [log for log in read_step_logs(step_logs) if log.request_id in asked]
    return balance(produced, billed, waste)


def read_billed(connection: Connection, request_ids: Collection[str]) -> dict[str, int]:
    """Output tokens billed for each of these requests that has ended."""
    billed = {}
    for page in _pages(request_ids):
        rows = connection.execute(
            text(
                """
                SELECT u.request_id, u.completion_tokens
                FROM unnest(CAST(:created_at AS timestamptz[]), CAST(:request_id AS text[]))
                     AS asked (created_at, request_id)
                JOIN usage_events u USING (created_at, request_id)
                """
            ),
            page,
        )
        for row in rows:
            billed[row.request_id] = row.completion_tokens
    return billed


def read_waste(connection: Connection, request_ids: Collection[str]) -> list[Waste]:
    """What of these requests was booked as wasted."""
    waste = []
    for page in _pages(request_ids):
        rows = connection.execute(
            text(
                """
                SELECT w.request_id, w.attempt, w.reason, w.replica_id, w.num_tokens
                FROM unnest(CAST(:created_at AS timestamptz[]), CAST(:request_id AS text[]))
                     AS asked (created_at, request_id)
                JOIN wasted_tokens w USING (created_at, request_id)
                """
            ),
            page,
        )
        waste += [
            Waste(
                row.request_id, row.attempt, WasteReason(row.reason), row.replica_id, row.num_tokens
            )
            for row in rows
        ]
    return waste


def read_violations(
    connection: Connection, since_s: float | None = None, limit: int = 100
) -> list[Violation]:
    """Broken laws, of the requests of the last `since_s` seconds or of all."""
    rows = connection.execute(
        text(
            """
            SELECT law, request_id, detail FROM invariant_violations
            WHERE CAST(:since_s AS float8) IS NULL
               OR created_at > now() - make_interval(secs => CAST(:since_s AS float8))
            ORDER BY created_at, request_id LIMIT :limit
            """
        ),
        {"since_s": since_s, "limit": limit},
    )
    return [Violation(row.law, row.request_id, row.detail) for row in rows]


def _pages(request_ids: Collection[str]) -> list[dict[str, object]]:
    ids = sorted(request_ids)
    pages = [ids[start : start + PAGE] for start in range(0, len(ids), PAGE)]
    return [{"created_at": [created_at_of(i) for i in page], "request_id": page} for page in pages]
