"""What ends a command with one line instead of a traceback."""


class CommandFailed(Exception):
    """Something that the person at the terminal can mend; the message says what and how."""
