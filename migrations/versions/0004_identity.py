"""Keys that expire and rotate, operators, quotas, and the log of what administrators did.

Every new column has a default, so that processes of the version before go on working.
"""

from alembic import op

revision = "0004"
down_revision = "0003"

TENANTS_AND_KEYS = """
-- Keys with the scope `admin` of an operator administer every tenant; those of any other tenant
-- administer that tenant's keys. Only who can reach the database makes an operator.
ALTER TABLE tenants
    ADD COLUMN is_operator  boolean NOT NULL DEFAULT false,
    ADD COLUMN suspended_at timestamptz;

ALTER TABLE api_keys
    ADD COLUMN name            text    NOT NULL DEFAULT '' CHECK (length(name) <= 200),
    ADD COLUMN expires_at      timestamptz,
    ADD COLUMN replaced_by     text    REFERENCES api_keys,
    ADD COLUMN resume_grace_s  integer NOT NULL DEFAULT 0
        CONSTRAINT api_keys_resume_grace CHECK (resume_grace_s BETWEEN 0 AND 60),
    ADD COLUMN last_used_at    timestamptz,
    ADD CONSTRAINT api_keys_replaced_ends CHECK (
        replaced_by IS NULL OR expires_at IS NOT NULL OR revoked_at IS NOT NULL);
CREATE INDEX api_keys_by_age ON api_keys (created_at, key_id);
CREATE INDEX tenants_by_age ON tenants (created_at, tenant_id);
"""

QUOTAS = """
-- What a tenant may use of a model; null is no limit. The model `*` stands for all models together
-- that have no row of their own. `max_concurrent` counts over all models, so it is said for `*`.
CREATE TABLE quotas (
    tenant_id            text        NOT NULL REFERENCES tenants,
    model                text        NOT NULL
        CHECK (model = '*' OR model ~ '^[a-z0-9][a-z0-9._-]{0,99}$'),
    tokens_per_minute    bigint      CHECK (tokens_per_minute > 0),
    requests_per_minute  bigint      CHECK (requests_per_minute > 0),
    max_concurrent       integer     CHECK (max_concurrent > 0),
    max_enqueued_tokens  bigint      CHECK (max_enqueued_tokens > 0),
    updated_at           timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, model),
    CONSTRAINT quotas_count_over_all_models CHECK (model = '*' OR max_concurrent IS NULL),
    CONSTRAINT quotas_limit_something CHECK (
        num_nonnulls(tokens_per_minute, requests_per_minute, max_concurrent,
                     max_enqueued_tokens) > 0)
);
"""

AUDIT = """
-- What administrators did: one row per change, written in the change's own transaction. It refers
-- to nothing, so that no later change can hang on it.
CREATE TABLE audit_log (
    audit_id    bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at  timestamptz NOT NULL DEFAULT now(),
    actor_type  text        NOT NULL CHECK (actor_type IN ('key', 'user')),
    actor_id    text        NOT NULL CHECK (actor_id <> ''),
    action      text        NOT NULL CHECK (action ~ '^[a-z_]+[.][a-z_]+$'),
    tenant_id   text,
    object_id   text        NOT NULL,
    before      jsonb,
    after       jsonb,
    request_id  text
);
CREATE INDEX audit_log_by_tenant ON audit_log (tenant_id, audit_id);
CREATE INDEX audit_log_by_object ON audit_log (object_id, audit_id);

CREATE FUNCTION refuse_changes_of_the_past() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION refuse_changes_of_the_past();
CREATE TRIGGER audit_log_never_truncated BEFORE TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_changes_of_the_past();
"""


def upgrade() -> None:
    for statements in (TENANTS_AND_KEYS, QUOTAS, AUDIT):
        op.execute(statements)


def downgrade() -> None:
    op.execute("DROP TABLE audit_log, quotas")
    op.execute("DROP FUNCTION refuse_changes_of_the_past()")
    op.execute("DROP INDEX api_keys_by_age, tenants_by_age")
    op.execute(
        "ALTER TABLE api_keys DROP COLUMN name, DROP COLUMN expires_at CASCADE,"
        " DROP COLUMN replaced_by CASCADE, DROP COLUMN resume_grace_s, DROP COLUMN last_used_at"
    )
    op.execute("ALTER TABLE tenants DROP COLUMN is_operator, DROP COLUMN suspended_at")
