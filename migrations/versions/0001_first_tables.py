"""The first tables: who may ask, what is served, what was asked, what it used, and batches.

Big tables are partitioned by month of the request's creation with the key (created_at,
request_id). An id carries its creation second, so an id alone finds its partition, and a second
usage row for one request is a key violation, whenever it arrives.
"""

from alembic import op

revision = "0001"
down_revision = None

PARTITIONED = ("requests", "usage_events", "request_timings", "request_outputs")

IDENTITY = """
CREATE TABLE tenants (
    tenant_id   text        PRIMARY KEY,
    name        text        NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 200),
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    key_id      text        PRIMARY KEY,
    tenant_id   text        NOT NULL REFERENCES tenants,
    key_hash    bytea       NOT NULL UNIQUE CHECK (length(key_hash) = 32),
    prefix      text        NOT NULL,
    scopes      text[]      NOT NULL
        CONSTRAINT api_keys_known_scopes
        CHECK (scopes <@ ARRAY['inference', 'batch', 'usage', 'admin'] AND cardinality(scopes) > 0),
    created_at  timestamptz NOT NULL DEFAULT now(),
    revoked_at  timestamptz
);
CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id);
"""

REGISTRY = """
CREATE TABLE models (
    model       text        PRIMARY KEY CHECK (model ~ '^[a-z0-9][a-z0-9._-]{0,99}$'),
    created_at  timestamptz NOT NULL DEFAULT now(),
    owned_by    text        NOT NULL DEFAULT 'headrace'
);

-- A version is one set of weights and the limits it is served under; it never changes.
CREATE TABLE model_versions (
    model             text        NOT NULL REFERENCES models,
    version           text        NOT NULL CHECK (version ~ '^[a-z0-9][a-z0-9._-]{0,99}$'),
    weights_digest    text        NOT NULL CHECK (weights_digest ~ '^[0-9a-f]{64}$'),
    weights_folder    text        NOT NULL,
    max_model_len     integer     NOT NULL CHECK (max_model_len > 1),
    max_output_tokens integer     NOT NULL CHECK (max_output_tokens BETWEEN 1 AND max_model_len),
    created_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (model, version)
);

-- The newest revision of a model is in force; flipping back is one insert.
CREATE TABLE rollouts (
    revision    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model       text        NOT NULL,
    version     text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (model, version) REFERENCES model_versions
);
CREATE INDEX rollouts_newest ON rollouts (model, revision DESC);
"""

REQUESTS = """
-- The reservation and the ending of a request, in one row. `held` is the only state that
-- changes, and only into one of the others, once.
CREATE TABLE requests (
    created_at        timestamptz NOT NULL,
    state             text        NOT NULL DEFAULT 'held'
        CHECK (state IN ('held', 'finished', 'cancelled', 'failed')),
    request_id        text        NOT NULL CHECK (length(request_id) = 26),
    attempt           integer     NOT NULL DEFAULT 1 CHECK (attempt > 0),
    tenant_id         text        NOT NULL REFERENCES tenants,
    key_id            text        NOT NULL,
    model             text        NOT NULL,
    version           text        NOT NULL,
    weights_digest    text        NOT NULL,
    priority_class    text        NOT NULL CHECK (priority_class IN ('interactive', 'batch')),
    endpoint          text        NOT NULL,
    reserved_tokens   bigint      NOT NULL CHECK (reserved_tokens > 0),
    prompt_tokens     bigint      NOT NULL CHECK (prompt_tokens >= 0),
    metadata          jsonb       NOT NULL DEFAULT '{}',
    completion_tokens bigint      CHECK (completion_tokens >= 0),
    cached_tokens     bigint      CHECK (cached_tokens BETWEEN 0 AND prompt_tokens),
    finish_reasons    text[],
    error_code        text,
    ended_at          timestamptz,
    PRIMARY KEY (created_at, request_id),
    CONSTRAINT requests_end_is_complete CHECK (
        (state = 'held') = (ended_at IS NULL)
        AND (state = 'held') = (completion_tokens IS NULL)
        AND (state = 'held') = (cached_tokens IS NULL)),
    CONSTRAINT requests_error_names_its_code CHECK (
        (state IN ('cancelled', 'failed')) = (error_code IS NOT NULL))
) PARTITION BY RANGE (created_at);
CREATE INDEX requests_held ON requests (created_at) WHERE state = 'held';
CREATE INDEX requests_by_tenant ON requests (tenant_id, created_at);

-- What a request used: append-only, one row per request, written in the transaction that
-- closes it. Delivered tokens are billed; wasted ones were computed and never delivered.
CREATE TABLE usage_events (
    created_at        timestamptz NOT NULL,
    request_id        text        NOT NULL,
    tenant_id         text        NOT NULL,
    key_id            text        NOT NULL,
    model             text        NOT NULL,
    version           text        NOT NULL,
    weights_digest    text        NOT NULL,
    priority_class    text        NOT NULL,
    endpoint          text        NOT NULL,
    outcome           text        NOT NULL CHECK (outcome IN ('finished', 'cancelled', 'failed')),
    error_code        text,
    prompt_tokens     bigint      NOT NULL CHECK (prompt_tokens >= 0),
    cached_tokens     bigint      NOT NULL CHECK (cached_tokens BETWEEN 0 AND prompt_tokens),
    completion_tokens bigint      NOT NULL CHECK (completion_tokens >= 0),
    wasted_tokens     bigint      NOT NULL CHECK (wasted_tokens >= 0),
    replica_id        text,
    attempt           integer     NOT NULL,
    settled_at        timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (created_at, request_id)
) PARTITION BY RANGE (created_at);
CREATE INDEX usage_events_by_tenant ON usage_events (tenant_id, created_at);

CREATE FUNCTION usage_events_are_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'usage_events is append-only: % refused', TG_OP
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER usage_events_append_only BEFORE UPDATE OR DELETE ON usage_events
    FOR EACH ROW EXECUTE FUNCTION usage_events_are_append_only();
CREATE TRIGGER usage_events_never_truncated BEFORE TRUNCATE ON usage_events
    FOR EACH STATEMENT EXECUTE FUNCTION usage_events_are_append_only();

-- Where a request's time went. Null where the stage was never reached.
CREATE TABLE request_timings (
    created_at        timestamptz NOT NULL,
    request_id        text        NOT NULL,
    replica_id        text,
    attempt           integer     NOT NULL,
    queue_s           double precision CHECK (queue_s >= 0),
    wait_s            double precision CHECK (wait_s >= 0),
    prefill_s         double precision CHECK (prefill_s >= 0),
    decode_s          double precision CHECK (decode_s >= 0),
    completion_tokens bigint      NOT NULL,
    PRIMARY KEY (created_at, request_id)
) PARTITION BY RANGE (created_at);

-- What a request said, kept where it must outlive the stream: batch results. Text is bytes
-- because models can say NUL and PostgreSQL's text cannot.
CREATE TABLE request_outputs (
    created_at    timestamptz NOT NULL,
    request_id    text        NOT NULL,
    choice        integer     NOT NULL CHECK (choice >= 0),
    token_ids     integer[]   NOT NULL,
    text          bytea       NOT NULL,
    finish_reason text,
    PRIMARY KEY (created_at, request_id, choice)
) PARTITION BY RANGE (created_at);
"""

PARTITIONS = """
-- Makes the monthly partitions of every big table for the month of `day` and the next
-- `num_months`. Safe to call by many at once and again.
CREATE FUNCTION ensure_partitions(day date, num_months integer)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    big_table text;
    month     date;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('ensure_partitions'));
    FOREACH big_table IN ARRAY
        ARRAY['requests', 'usage_events', 'request_timings', 'request_outputs'] LOOP
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
SELECT ensure_partitions(now()::date, 2);
"""

BATCHES = """
CREATE TABLE files (
    file_id     text        PRIMARY KEY,
    tenant_id   text        NOT NULL REFERENCES tenants,
    purpose     text        NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    filename    text        NOT NULL,
    num_bytes   bigint      NOT NULL CHECK (num_bytes >= 0),
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    deleted_at  timestamptz
);
CREATE INDEX files_by_tenant ON files (tenant_id, created_at);

CREATE TABLE batches (
    batch_id          text        PRIMARY KEY,
    status            text        NOT NULL DEFAULT 'validating'
        CHECK (status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed',
                          'expired', 'cancelling', 'cancelled')),
    tenant_id         text        NOT NULL REFERENCES tenants,
    key_id            text        NOT NULL,
    endpoint          text        NOT NULL
        CHECK (endpoint IN ('/v1/chat/completions', '/v1/completions')),
    completion_window text        NOT NULL CHECK (completion_window IN ('24h', '12h', '4h', '1h')),
    input_file_id     text        NOT NULL REFERENCES files,
    output_file_id    text        REFERENCES files,
    error_file_id     text        REFERENCES files,
    model             text,
    metadata          jsonb       NOT NULL DEFAULT '{}',
    errors            jsonb,
    total             integer     NOT NULL DEFAULT 0,
    created_at        timestamptz NOT NULL DEFAULT now(),
    expires_at        timestamptz NOT NULL,
    in_progress_at    timestamptz,
    finalizing_at     timestamptz,
    completed_at      timestamptz,
    failed_at         timestamptz,
    expired_at        timestamptz,
    cancelling_at     timestamptz,
    cancelled_at      timestamptz,
    CONSTRAINT batches_completed_has_time CHECK (
        (status = 'completed') = (completed_at IS NOT NULL)),
    CONSTRAINT batches_failed_has_time CHECK (
        (status = 'failed') = (failed_at IS NOT NULL)),
    CONSTRAINT batches_expired_has_time CHECK (
        (status = 'expired') = (expired_at IS NOT NULL)),
    CONSTRAINT batches_cancelled_has_time CHECK (
        (status = 'cancelled') = (cancelled_at IS NOT NULL)),
    CONSTRAINT batches_failed_has_errors CHECK ((status = 'failed') = (errors IS NOT NULL))
);
CREATE INDEX batches_by_tenant ON batches (tenant_id, created_at, batch_id);
CREATE INDEX batches_open ON batches (created_at)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');

-- One line of a batch. A claim raises `epoch`, and every later write names the epoch it holds,
-- so a worker that lost its lease writes nothing. `request_id` is set by the first claim and
-- kept: a line is one request however many workers carry it.
CREATE TABLE batch_items (
    batch_id     text        NOT NULL REFERENCES batches,
    line         integer     NOT NULL CHECK (line > 0),
    state        text        NOT NULL DEFAULT 'available'
        CHECK (state IN ('available', 'running', 'completed', 'failed')),
    custom_id    text        NOT NULL,
    body         bytea       NOT NULL,
    epoch        integer     NOT NULL DEFAULT 0,
    leased_until timestamptz,
    request_id   text,
    status_code  integer,
    response     bytea,
    error        jsonb,
    ended_at     timestamptz,
    PRIMARY KEY (batch_id, line),
    UNIQUE (batch_id, custom_id),
    CONSTRAINT batch_items_running_is_leased CHECK (
        (state = 'running') = (leased_until IS NOT NULL)),
    CONSTRAINT batch_items_end_is_complete CHECK (
        (state IN ('completed', 'failed')) = (ended_at IS NOT NULL)),
    CONSTRAINT batch_items_completed_has_response CHECK (
        state <> 'completed' OR (status_code = 200 AND response IS NOT NULL)),
    CONSTRAINT batch_items_failed_says_why CHECK (
        state <> 'failed' OR (error IS NOT NULL OR status_code <> 200))
);
CREATE INDEX batch_items_available ON batch_items (batch_id, line) WHERE state = 'available';
CREATE INDEX batch_items_leased ON batch_items (leased_until) WHERE state = 'running';
"""


def upgrade() -> None:
    for statements in (IDENTITY, REGISTRY, REQUESTS, PARTITIONS, BATCHES):
        op.execute(statements)


def downgrade() -> None:
    op.execute("DROP TABLE batch_items, batches, files")
    op.execute("DROP FUNCTION ensure_partitions(date, integer)")
    op.execute(f"DROP TABLE {', '.join(PARTITIONED)}")
    op.execute("DROP FUNCTION usage_events_are_append_only()")
    op.execute("DROP TABLE rollouts, model_versions, models, api_keys, tenants")
