"""What was produced and what was wasted, beside what was delivered."""

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Nothing yet."""


def downgrade() -> None:
    """Nothing yet."""
