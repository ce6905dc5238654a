"""Requests that may be asked for again: by key, by id, after a broken stream.

`answer_form` is how a request's answer is told, so that any gateway can go on with it. A key is
kept for a day with the hash of the body that it came with, and is written in the transaction
that writes what it stands for: one key is one request, however many ask at once. Not partitioned:
it must be unique over all times, and it is pruned.

A broken request is one whose connection broke. If no byte of its answer was written and nobody
was told it later, its tokens count against quotas and are waste on the invoice: the view
`undelivered_requests` has these.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

ADD_FORM = "ALTER TABLE requests ADD COLUMN answer_form bytea"

KEYS = """
CREATE TABLE idempotency_keys (
    tenant_id   text        NOT NULL REFERENCES tenants,
    endpoint    text        NOT NULL,
    key         text        NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
    body_hash   bytea       NOT NULL CHECK (length(body_hash) = 32),
    -- The request, batch or file that the first call made.
    object_id   text        NOT NULL,
    -- What it was answered, where that is not made anew from the object.
    response    bytea,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, key, endpoint)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);
CREATE INDEX idempotency_keys_by_object ON idempotency_keys (object_id);
"""

BROKEN = """
CREATE TABLE broken_requests (
    created_at   timestamptz NOT NULL,
    request_id   text        NOT NULL,
    key_id       text        NOT NULL,
    -- What it asked, if its caller repeats what breaks; and the one repetition that it went to.
    body_hash    bytea       CHECK (length(body_hash) = 32),
    retried_by   text,
    -- Whether some of the answer was written before the break, and when somebody heard it after.
    was_heard    boolean     NOT NULL,
    broken_at    timestamptz NOT NULL DEFAULT now(),
    heard_at     timestamptz,
    PRIMARY KEY (created_at, request_id)
);
CREATE INDEX broken_requests_to_retry ON broken_requests (key_id, body_hash, broken_at)
    WHERE retried_by IS NULL;

CREATE VIEW undelivered_requests AS
    SELECT created_at, request_id, broken_at FROM broken_requests
    WHERE NOT was_heard AND heard_at IS NULL;
"""


def upgrade() -> None:
    for statements in (ADD_FORM, KEYS, BROKEN):
        op.execute(statements)


def downgrade() -> None:
    op.execute("DROP VIEW undelivered_requests")
    op.execute("DROP TABLE broken_requests, idempotency_keys")
    op.execute("ALTER TABLE requests DROP COLUMN answer_form")
