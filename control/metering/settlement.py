"""Closing requests and metering them: one statement, many requests, all or nothing.

A settlement closes a held row under the attempt it names and, in the same transaction, writes
its usage, its timings and the outputs that must be kept. A request that was ended before, or
that another attempt has meanwhile taken over, is left alone: it gets no second usage row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

import msgspec
from sqlalchemy import Connection, text

from control.identity.request_id import created_at_of
from control.metering.output_scores import OutputScores, pack_scores
from control.metering.timings import Timings
from engine.interface.generation_delta import FinishReason, Usage

# The attempt that a request's row is born with; later ones are fenced by `begin_attempt`.
FIRST_ATTEMPT = 1


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one choice said, to be kept beyond the stream."""

    choice: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    scores: OutputScores = field(default_factory=OutputScores)


class WasteReason(StrEnum):
    """Why output tokens were computed and never delivered."""

    STOP = "stop"  # They followed the end of the answer.
    MOVED = "moved"  # Another attempt, or an ending, had overtaken this one.
    REQUEST_LOST = "request_lost"  # Redis no longer knew the request.
    REPLICA_LOST = "replica_lost"  # Their replica died before it could publish them.


@dataclass(frozen=True, slots=True)
class Settlement:
    """How one attempt of one request ended.

    `usage` is what was delivered, and what is billed. `waste` was computed and never delivered.
    `error` is None for a request that finished. `replica_id` is None when it never ran. `outputs`
    are stored only if they are given.
    """

    request_id: str
    attempt: int
    usage: Usage
    finish_reasons: tuple[FinishReason | None, ...] = ()
    error: str | None = None
    waste: Mapping[WasteReason, int] = field(default_factory=dict)
    replica_id: str | None = None
    timings: Timings = field(default_factory=Timings)
    outputs: tuple[ChoiceOutput, ...] = ()

    @property
    def wasted_tokens(self) -> int:
        """What this attempt computed and did not deliver, for whatever reason."""
        return sum(self.waste.values())

    @property
    def outcome(self) -> str:
        """The request's terminal state."""
        if self.error is None:
            return "finished"
        return "cancelled" if self.error == "cancelled" else "failed"


_SETTLE = text(
    """
    WITH ending AS (
        SELECT * FROM unnest(
            CAST(:created_at AS timestamptz[]), CAST(:request_id AS text[]),
            CAST(:attempt AS integer[]), CAST(:outcome AS text[]), CAST(:error AS text[]),
            CAST(:finish_reasons AS text[]), CAST(:prompt_tokens AS bigint[]),
            CAST(:cached_tokens AS bigint[]), CAST(:completion_tokens AS bigint[]),
            CAST(:wasted_tokens AS bigint[]), CAST(:replica_id AS text[])
        ) AS e (created_at, request_id, attempt, outcome, error, finish_reasons, prompt_tokens,
                cached_tokens, completion_tokens, wasted_tokens, replica_id)
        ORDER BY request_id
    ), closed AS (
        UPDATE requests r
        SET state = e.outcome, ended_at = now(), error_code = e.error,
            completion_tokens = e.completion_tokens, cached_tokens = e.cached_tokens,
            finish_reasons = CAST(e.finish_reasons AS text[])
        FROM ending e
        WHERE r.created_at = e.created_at AND r.request_id = e.request_id
          AND r.state = 'held' AND r.attempt = e.attempt
        RETURNING r.created_at, r.request_id, r.tenant_id, r.key_id, r.model, r.version,
                  r.weights_digest, r.priority_class, r.endpoint
    ), metered AS (
        INSERT INTO usage_events (created_at, request_id, tenant_id, key_id, model, version,
                                  weights_digest, priority_class, endpoint, outcome, error_code,
                                  prompt_tokens, cached_tokens, completion_tokens, wasted_tokens,
                                  replica_id, attempt)
        SELECT c.created_at, c.request_id, c.tenant_id, c.key_id, c.model, c.version,
               c.weights_digest, c.priority_class, c.endpoint, e.outcome, e.error,
               e.prompt_tokens, e.cached_tokens, e.completion_tokens, e.wasted_tokens,
               e.replica_id, e.attempt
        FROM closed c JOIN ending e USING (request_id)
    ), timed AS (
        INSERT INTO request_timings (
            created_at, request_id, replica_id, attempt, completion_tokens, cached_tokens,
            finish_reasons, error_code, accept_s, queue_s, place_s, wait_s, prefill_s, publish_s,
            decode_s, inter_token_p50_s, inter_token_p95_s, inter_token_max_s, cancel_asked_at,
            cancel_seen_s, cancel_step, cancel_num_steps, cancel_tokens_after,
            cancel_blocks_freed)
        SELECT c.created_at, c.request_id, e.replica_id, e.attempt, e.completion_tokens,
               e.cached_tokens, CAST(e.finish_reasons AS text[]), e.error, t.accept_s, t.queue_s,
               t.place_s, t.wait_s, t.prefill_s, t.publish_s, t.decode_s, t.inter_token_p50_s,
               t.inter_token_p95_s, t.inter_token_max_s, to_timestamp(k.asked_at), k.seen_s,
               k.step, k.num_steps, k.tokens_after, k.blocks_freed
        FROM closed c
        JOIN ending e USING (request_id)
        JOIN jsonb_to_recordset(CAST(:timings AS jsonb)) AS t (
            request_id text, accept_s float8, queue_s float8, place_s float8, wait_s float8,
            prefill_s float8, publish_s float8, decode_s float8, inter_token_p50_s float8,
            inter_token_p95_s float8, inter_token_max_s float8, cancel jsonb) USING (request_id)
        CROSS JOIN jsonb_to_record(COALESCE(NULLIF(t.cancel, 'null'), '{}')) AS k (
            asked_at float8, seen_s float8, step bigint, num_steps integer, tokens_after integer,
            blocks_freed integer)
    ), wasted AS (
        INSERT INTO wasted_tokens (created_at, request_id, attempt, reason, replica_id, num_tokens)
        SELECT c.created_at, w.request_id, w.attempt, w.reason, w.replica_id, w.num_tokens
        FROM unnest(
            CAST(:waste_request_id AS text[]), CAST(:waste_attempt AS integer[]),
            CAST(:waste_reason AS text[]), CAST(:waste_replica_id AS text[]),
            CAST(:waste_num_tokens AS bigint[])
        ) AS w (request_id, attempt, reason, replica_id, num_tokens)
        JOIN closed c USING (request_id)
    ), kept AS (
        INSERT INTO request_outputs (created_at, request_id, choice, token_ids, text,
                                     finish_reason, scores)
        SELECT c.created_at, o.request_id, o.choice, CAST(o.token_ids AS integer[]), o.text,
               o.finish_reason, o.scores
        FROM unnest(
            CAST(:output_request_id AS text[]), CAST(:output_choice AS integer[]),
            CAST(:output_token_ids AS text[]), CAST(:output_text AS bytea[]),
            CAST(:output_finish_reason AS text[]), CAST(:output_scores AS bytea[])
        ) AS o (request_id, choice, token_ids, text, finish_reason, scores)
        JOIN closed c USING (request_id)
    )
    SELECT request_id FROM closed
    """
)


def settle(connection: Connection, settlements: Sequence[Settlement]) -> frozenset[str]:
    """Settle many requests in one statement. Returns the ids that were closed by it.

    The others were ended already or belong to another attempt; see `read_ending`. A request id
    appears at most once.
    """
    outputs = [(s.request_id, output) for s in settlements for output in s.outputs]
    waste = [w for s in settlements for w in waste_of(s)]
    rows = connection.execute(
        _SETTLE,
        {
            "created_at": [created_at_of(s.request_id) for s in settlements],
            "request_id": [s.request_id for s in settlements],
            "attempt": [s.attempt for s in settlements],
            "outcome": [s.outcome for s in settlements],
            "error": [s.error for s in settlements],
            "finish_reasons": [_array(s.finish_reasons) for s in settlements],
            "prompt_tokens": [s.usage.prompt_tokens for s in settlements],
            "cached_tokens": [s.usage.cached_tokens for s in settlements],
            "completion_tokens": [s.usage.completion_tokens for s in settlements],
            "wasted_tokens": [s.wasted_tokens for s in settlements],
            "replica_id": [s.replica_id for s in settlements],
            "timings": msgspec.json.encode(
                [{"request_id": s.request_id, **_fields(s.timings)} for s in settlements]
            ).decode(),
            **_waste_columns(waste),
            "output_request_id": [request_id for request_id, _ in outputs],
            "output_choice": [output.choice for _, output in outputs],
            "output_token_ids": [_array(output.token_ids) for _, output in outputs],
            "output_text": [output.text.encode() for _, output in outputs],
            "output_finish_reason": [output.finish_reason for _, output in outputs],
            "output_scores": [pack_scores(output.scores) for _, output in outputs],
        },
    )
    return frozenset(row.request_id for row in rows)


@dataclass(frozen=True, slots=True)
class Waste:
    """Tokens that one attempt computed and did not deliver."""

    request_id: str
    attempt: int
    reason: WasteReason
    replica_id: str
    num_tokens: int


def waste_of(settlement: Settlement) -> list[Waste]:
    """The settlement's waste, of a request that ran."""
    replica_id = settlement.replica_id
    if replica_id is None:
        return []
    return [
        Waste(settlement.request_id, settlement.attempt, reason, replica_id, num_tokens)
        for reason, num_tokens in settlement.waste.items()
        if num_tokens
    ]


def book_waste(connection: Connection, waste: Sequence[Waste]) -> None:
    """Note what attempts wasted that settled nothing. Harmless to repeat."""
    connection.execute(
        text(
            """
            INSERT INTO wasted_tokens (created_at, request_id, attempt, reason, replica_id,
                                       num_tokens)
            SELECT * FROM unnest(
                CAST(:created_at AS timestamptz[]), CAST(:waste_request_id AS text[]),
                CAST(:waste_attempt AS integer[]), CAST(:waste_reason AS text[]),
                CAST(:waste_replica_id AS text[]), CAST(:waste_num_tokens AS bigint[]))
            ON CONFLICT DO NOTHING
            """
        ),
        {
            "created_at": [created_at_of(w.request_id) for w in waste],
            **_waste_columns(waste),
        },
    )


class Claim(StrEnum):
    """What an attempt finds when it claims a request's row."""

    OURS = "ours"
    OVERTAKEN = "overtaken"
    ENDED = "ended"
    UNKNOWN = "unknown"


def begin_attempt(connection: Connection, request_id: str, attempt: int) -> Claim:
    """Fence off earlier attempts of a held request.

    OVERTAKEN means that the row has seen this attempt number or a later one: either somebody
    took over, or Redis has lost the moves that raised it, and whoever has the request must raise
    it again.
    """
    values = {
        "request_id": request_id,
        "created_at": created_at_of(request_id),
        "attempt": attempt,
    }
    result = connection.execute(
        text(
            """
            UPDATE requests SET attempt = :attempt
            WHERE created_at = :created_at AND request_id = :request_id
              AND state = 'held' AND attempt < :attempt
            """
        ),
        values,
    )
    if result.rowcount == 1:
        return Claim.OURS
    state = connection.execute(
        text(
            """
            SELECT state FROM requests
            WHERE created_at = :created_at AND request_id = :request_id
            """
        ),
        values,
    ).scalar_one_or_none()
    if state is None:
        return Claim.UNKNOWN
    return Claim.OVERTAKEN if state == "held" else Claim.ENDED


@dataclass(frozen=True, slots=True)
class StoredEnding:
    """The ending that a request's row tells, from which its last delta can be rebuilt."""

    usage: Usage
    error: str | None


def read_ending(connection: Connection, request_id: str) -> StoredEnding | None:
    """How the request ended, or None while it is held (or unknown)."""
    row = connection.execute(
        text(
            """
            SELECT u.prompt_tokens, u.completion_tokens, u.cached_tokens, u.error_code
            FROM usage_events u WHERE u.created_at = :created_at AND u.request_id = :request_id
            """
        ),
        {"request_id": request_id, "created_at": created_at_of(request_id)},
    ).one_or_none()
    if row is None:
        return None
    prompt_tokens, completion_tokens, cached_tokens, error = row
    return StoredEnding(Usage(prompt_tokens, completion_tokens, cached_tokens), error)


def _waste_columns(waste: Sequence[Waste]) -> dict[str, list[object]]:
    return {
        "waste_request_id": [w.request_id for w in waste],
        "waste_attempt": [w.attempt for w in waste],
        "waste_reason": [w.reason for w in waste],
        "waste_replica_id": [w.replica_id for w in waste],
        "waste_num_tokens": [w.num_tokens for w in waste],
    }


def _fields(timings: Timings) -> dict[str, object]:
    return {field.name: getattr(timings, field.name) for field in fields(timings)}


def _array(values: Sequence[int] | Sequence[FinishReason | None]) -> str:
    """A PostgreSQL array literal of numbers or plain words."""
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"
