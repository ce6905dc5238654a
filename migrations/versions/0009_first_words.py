"""How long a reader waited for the first words, by the gateway that told them.

It closes the account of a first token: what the stages before do not explain is the way from the
feed through the gateway.
"""

from alembic import op

revision = "0009"
down_revision = "0008"

VIEW = """
CREATE VIEW request_stages AS
SELECT t.created_at, t.request_id, r.tenant_id, r.model, r.priority_class, t.replica_id,
       t.attempt AS num_attempts, t.accept_s, t.queue_s, t.place_s, t.wait_s, t.prefill_s,
       t.publish_s, {tell} t.first_token_s,
       t.decode_s, t.inter_token_p50_s, t.inter_token_p95_s, t.inter_token_max_s,
       r.prompt_tokens, t.cached_tokens, t.completion_tokens, t.finish_reasons, t.error_code
FROM (
    SELECT *, CASE WHEN publish_s IS NOT NULL THEN
        COALESCE(accept_s, 0) + COALESCE(queue_s, 0) + COALESCE(place_s, 0)
        + COALESCE(wait_s, 0) + COALESCE(prefill_s, 0) + publish_s END AS first_token_s
    FROM request_timings
) t
JOIN requests r ON r.created_at = t.created_at AND r.request_id = t.request_id
"""
TELL = """
       -- Of a later attempt's reader the first words may have been an earlier one's.
       CASE WHEN t.attempt = 1 THEN t.told_s - t.first_token_s END AS tell_s, t.told_s,
"""


def upgrade() -> None:
    op.execute("ALTER TABLE request_timings ADD COLUMN told_s double precision CHECK (told_s >= 0)")
    op.execute("DROP VIEW request_stages")
    op.execute(VIEW.format(tell=TELL))


def downgrade() -> None:
    op.execute("DROP VIEW request_stages")
    op.execute("ALTER TABLE request_timings DROP COLUMN told_s")
    op.execute(VIEW.format(tell=""))
