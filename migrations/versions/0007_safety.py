"""Screens of prompts and outputs."""

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
