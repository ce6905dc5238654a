"""Requests that may be asked for again: by key, by id, after a broken stream."""

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
