"""Requests that may be asked for again: by key, by id, after a broken stream.

`answer_form` is how a request's answer is told, so that any gateway can go on with it. A key is
kept for a day with the hash of the body that it came with, and is written in the transaction
that writes what it stands for: one key is one request, however many ask at once. Not partitioned:
it must be unique over all times, and it is pruned.

An undelivered request is one whose connection broke before a byte of its answer was written. Its
tokens count against quotas and are waste on the invoice, unless the answer was told after all.
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
    PRIMARY KEY (tenant_id, endpoint, key)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);
"""

UNDELIVERED = """
CREATE TABLE undelivered_requests (
    created_at   timestamptz NOT NULL,
    request_id   text        NOT NULL,
    key_id       text        NOT NULL,
    -- What it asked, if its caller repeats what breaks; and the one repetition that it went to.
    body_hash    bytea       CHECK (length(body_hash) = 32),
    broken_at    timestamptz NOT NULL DEFAULT now(),
    retried_by   text,
    delivered_at timestamptz,
    PRIMARY KEY (created_at, request_id)
);
CREATE INDEX undelivered_requests_to_retry ON undelivered_requests (key_id, body_hash, broken_at)
    WHERE retried_by IS NULL;
"""


def upgrade() -> None:
    for statements in (ADD_FORM, KEYS, UNDELIVERED):
        op.execute(statements)


def downgrade() -> None:
    op.execute("DROP TABLE undelivered_requests, idempotency_keys")
    op.execute("ALTER TABLE requests DROP COLUMN answer_form")
