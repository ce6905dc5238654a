"""What was produced and what was wasted, beside what was delivered.

Produced tokens are counted by each replica in a file of its own. Here is what of them was never
delivered, and why: one row for each attempt and reason. Then produced = delivered + wasted, and
delivered is what the ledger bills.

`invariant_violations` must be empty. It is the union of views named `violations_of_...`, each
with the same columns: a later migration adds a law by another such view and a new union.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

WASTE = """
CREATE TABLE wasted_tokens (
    created_at  timestamptz NOT NULL,
    request_id  text        NOT NULL,
    attempt     integer     NOT NULL CHECK (attempt > 0),
    reason      text        NOT NULL,
    replica_id  text        NOT NULL,
    num_tokens  bigint      NOT NULL CHECK (num_tokens > 0),
    booked_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (created_at, request_id, attempt, reason)
) PARTITION BY RANGE (created_at);
CREATE TRIGGER wasted_tokens_append_only BEFORE UPDATE OR DELETE ON wasted_tokens
    FOR EACH ROW EXECUTE FUNCTION usage_events_are_append_only();

CREATE OR REPLACE FUNCTION usage_events_are_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation';
END $$;
"""

PARTITIONS = """
CREATE OR REPLACE FUNCTION ensure_partitions(day date, num_months integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    big_table text;
    month     date;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('ensure_partitions'));
    FOREACH big_table IN ARRAY ARRAY[{tables}] LOOP
        FOR ahead IN 0 .. num_months LOOP
            month := date_trunc('month', day)::date + make_interval(months => ahead);
            EXECUTE format(
                'CREATE TABLE IF NOT EXISTS %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                big_table || to_char(month, '_YYYY_MM'), big_table,
                to_char(month, 'YYYY-MM-DD') || ' 00:00:00+00',
                to_char(month + interval '1 month', 'YYYY-MM-DD') || ' 00:00:00+00');
        END LOOP;
        -- A clock that is wrong by years must not refuse a settlement.
        EXECUTE format('CREATE TABLE IF NOT EXISTS %I PARTITION OF %I DEFAULT',
                       big_table || '_other', big_table);
    END LOOP;
END $$;
"""
TABLES = ("requests", "usage_events", "request_timings", "request_outputs")

VIOLATIONS = """
CREATE VIEW violations_of_endings AS
SELECT 'an ended request has one usage row' AS law, r.created_at, r.request_id,
       'state ' || r.state AS detail
FROM requests r
LEFT JOIN usage_events u ON u.created_at = r.created_at AND u.request_id = r.request_id
WHERE r.state <> 'held' AND u.request_id IS NULL
UNION ALL
SELECT 'a held request has no usage row', r.created_at, r.request_id, 'outcome ' || u.outcome
FROM requests r
JOIN usage_events u ON u.created_at = r.created_at AND u.request_id = r.request_id
WHERE r.state = 'held'
UNION ALL
SELECT 'a request is held for two days at most', r.created_at, r.request_id,
       'attempt ' || r.attempt
FROM requests r
WHERE r.state = 'held' AND r.created_at < now() - interval '2 days';

CREATE VIEW violations_of_usage AS
SELECT 'a usage row says what its request says' AS law, u.created_at, u.request_id,
       format('%s %s %s, %s %s %s', r.state, r.completion_tokens, r.attempt,
              u.outcome, u.completion_tokens, u.attempt) AS detail
FROM usage_events u
JOIN requests r ON r.created_at = u.created_at AND r.request_id = u.request_id
WHERE (r.state, r.tenant_id, r.key_id, r.model, r.version, r.attempt, r.completion_tokens,
       r.cached_tokens)
      IS DISTINCT FROM
      (u.outcome, u.tenant_id, u.key_id, u.model, u.version, u.attempt, u.completion_tokens,
       u.cached_tokens)
      OR u.prompt_tokens > r.prompt_tokens
      OR u.prompt_tokens + u.completion_tokens > r.reserved_tokens;

CREATE VIEW violations_of_outputs AS
SELECT 'stored outputs have as many tokens as were billed' AS law, o.created_at, o.request_id,
       format('stored %s, billed %s', sum(cardinality(o.token_ids)), u.completion_tokens) AS detail
FROM request_outputs o
JOIN usage_events u ON u.created_at = o.created_at AND u.request_id = o.request_id
GROUP BY o.created_at, o.request_id, u.completion_tokens
HAVING sum(cardinality(o.token_ids)) <> u.completion_tokens;

CREATE VIEW violations_of_waste AS
SELECT 'the waste of the attempt that settled is booked' AS law, u.created_at, u.request_id,
       format('said %s, booked %s', u.wasted_tokens, COALESCE(sum(w.num_tokens), 0)) AS detail
FROM usage_events u
LEFT JOIN wasted_tokens w ON w.created_at = u.created_at AND w.request_id = u.request_id
                         AND w.attempt = u.attempt AND w.reason <> 'replica_lost'
GROUP BY u.created_at, u.request_id, u.wasted_tokens
HAVING u.wasted_tokens <> COALESCE(sum(w.num_tokens), 0);

CREATE VIEW invariant_violations AS
SELECT * FROM violations_of_endings
UNION ALL SELECT * FROM violations_of_usage
UNION ALL SELECT * FROM violations_of_outputs
UNION ALL SELECT * FROM violations_of_waste;
"""


def upgrade() -> None:
    op.execute(WASTE)
    op.execute(_partitions((*TABLES, "wasted_tokens")))
    op.execute("SELECT ensure_partitions(now()::date, 2)")
    op.execute(VIOLATIONS)


def downgrade() -> None:
    op.execute("DROP VIEW invariant_violations, violations_of_endings, violations_of_usage")
    op.execute("DROP VIEW violations_of_outputs, violations_of_waste")
    op.execute(_partitions(TABLES))
    op.execute("DROP TABLE wasted_tokens")


def _partitions(tables: tuple[str, ...]) -> str:
    return PARTITIONS.replace("{tables}", ", ".join(f"'{table}'" for table in tables))
