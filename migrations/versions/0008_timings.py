"""One record per request of where its time went, and the proof of every cancellation.

Nullable columns only: processes of the version before go on writing theirs.
"""

from alembic import op

revision = "0008"
down_revision = "0007"

TIMINGS = """
-- The stages are drawn in control/metering/timings.py. The first six follow one another.
ALTER TABLE request_timings
    ADD COLUMN accept_s            double precision CHECK (accept_s >= 0),
    ADD COLUMN place_s             double precision CHECK (place_s >= 0),
    ADD COLUMN publish_s           double precision CHECK (publish_s >= 0),
    ADD COLUMN inter_token_p50_s   double precision CHECK (inter_token_p50_s >= 0),
    ADD COLUMN inter_token_p95_s   double precision CHECK (inter_token_p95_s >= 0),
    ADD COLUMN inter_token_max_s   double precision CHECK (inter_token_max_s >= 0),
    ADD COLUMN cached_tokens       bigint           CHECK (cached_tokens >= 0),
    ADD COLUMN finish_reasons      text[],
    ADD COLUMN error_code          text,
    ADD COLUMN cancel_asked_at     timestamptz,
    ADD COLUMN cancel_seen_s       double precision CHECK (cancel_seen_s >= 0),
    ADD COLUMN cancel_step         bigint           CHECK (cancel_step >= 0),
    ADD COLUMN cancel_num_steps    integer          CHECK (cancel_num_steps >= 0),
    ADD COLUMN cancel_tokens_after integer          CHECK (cancel_tokens_after >= 0),
    ADD COLUMN cancel_blocks_freed integer          CHECK (cancel_blocks_freed >= 0),
    ADD CONSTRAINT request_timings_cancel_was_asked CHECK (
        cancel_asked_at IS NOT NULL
        OR num_nonnulls(cancel_seen_s, cancel_step, cancel_num_steps) = 0);
"""

VIEWS = """
-- Who delayed a request: all its stages, and their sum, the time to its first token.
CREATE VIEW request_stages AS
SELECT t.created_at, t.request_id, r.tenant_id, r.model, r.priority_class, t.replica_id,
       t.attempt AS num_attempts, t.accept_s, t.queue_s, t.place_s, t.wait_s, t.prefill_s,
       t.publish_s,
       CASE WHEN t.publish_s IS NOT NULL THEN
           COALESCE(t.accept_s, 0) + COALESCE(t.queue_s, 0) + COALESCE(t.place_s, 0)
           + COALESCE(t.wait_s, 0) + COALESCE(t.prefill_s, 0) + t.publish_s
       END AS first_token_s,
       t.decode_s, t.inter_token_p50_s, t.inter_token_p95_s, t.inter_token_max_s,
       r.prompt_tokens, t.cached_tokens, t.completion_tokens, t.finish_reasons, t.error_code
FROM request_timings t
JOIN requests r ON r.created_at = t.created_at AND r.request_id = t.request_id;

-- Every cancellation: when it was asked, when the engine had stopped, at which of its steps and how
-- many after it was told, what it said after that, and the KV blocks that came free. A request
-- that no engine had has no step.
CREATE VIEW cancel_proof AS
SELECT t.created_at, t.request_id, t.replica_id, t.cancel_asked_at AS asked_at,
       t.cancel_asked_at + make_interval(secs => t.cancel_seen_s) AS seen_at,
       t.cancel_seen_s AS seen_s, t.cancel_step AS step, t.cancel_num_steps AS num_steps,
       t.cancel_tokens_after AS tokens_after, t.cancel_blocks_freed AS blocks_freed,
       COALESCE(t.cancel_num_steps, 0) <= 2 AS is_within_two_steps
FROM request_timings t
WHERE t.cancel_asked_at IS NOT NULL;
"""

COLUMNS = (
    "accept_s, place_s, publish_s, inter_token_p50_s, inter_token_p95_s, inter_token_max_s,"
    " cached_tokens, finish_reasons, error_code, cancel_asked_at, cancel_seen_s, cancel_step,"
    " cancel_num_steps, cancel_tokens_after, cancel_blocks_freed"
)


def upgrade() -> None:
    op.execute(TIMINGS)
    op.execute(VIEWS)


def downgrade() -> None:
    op.execute("DROP VIEW request_stages, cancel_proof")
    dropped = ", ".join(f"DROP COLUMN {name.strip()}" for name in COLUMNS.split(","))
    op.execute(
        f"ALTER TABLE request_timings DROP CONSTRAINT request_timings_cancel_was_asked, {dropped}"
    )
