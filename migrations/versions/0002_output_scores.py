"""Logprobs of stored outputs: a batch's line that asked for them must find them at its end.

They are read and written as a whole, so they are one value, packed by
`control.metering.output_scores`.
"""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE request_outputs ADD COLUMN scores bytea")


def downgrade() -> None:
    op.execute("ALTER TABLE request_outputs DROP COLUMN scores")
