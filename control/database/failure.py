"""What went wrong with the database, in one line for people: no SQL, no URL, no traceback."""

from psycopg.errors import UndefinedTable
from sqlalchemy.exc import DBAPIError, SQLAlchemyError


def in_words(error: SQLAlchemyError) -> str:
    """The driver's own words on one line; a database without our tables is called that."""
    if not isinstance(error, DBAPIError):
        return type(error).__name__
    if isinstance(error.orig, UndefinedTable):
        return "it has no tables of Headrace (`headrace migrate` makes them)"
    return " ".join(str(error.orig).split())
