"""What the URLs of the three servers must look like, checked before anything connects.

Each check returns the URL or raises ValueError. Messages say what is expected and show nothing
of the URL: any part of it may be a piece of a password that was not percent-encoded.
"""

from urllib.parse import urlsplit

import psycopg
import redis
from kombu.transport import TRANSPORT_ALIASES
from psycopg.conninfo import make_conninfo
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

_ENCODE = "; in a user or password, write @ / : # ? % as %40 %2F %3A %23 %3F %25"
_DATABASE = f"it must look like postgresql://user:password@host:5432/database{_ENCODE}"
_REDIS = f"it must look like redis://:password@host:6379/0, rediss://… or unix:///path{_ENCODE}"
_BROKER = (
    "it must be a broker's URL for Celery, like redis://:password@host:6379/1 or "
    f"redis+socket:///path?virtual_host=1{_ENCODE}"
)


def check_database_url(url: str) -> str:
    """PostgreSQL, by whatever driver's name (ours is put in its place)."""
    try:
        parts = make_url(url)
        make_conninfo("", **{name: str(value) for name, value in parts.query.items()})
    except (ArgumentError, ValueError, psycopg.ProgrammingError):
        raise ValueError(_DATABASE) from None
    if not parts.drivername.startswith("postgres") or "@" in (parts.host or ""):
        raise ValueError(_DATABASE)
    return url


def check_redis_url(url: str) -> str:
    """Redis or Valkey, over TCP, TLS or a socket."""
    try:
        parts = urlsplit(url)
        redis.ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError):
        raise ValueError(_REDIS) from None
    if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise ValueError(_REDIS)
    return url


def check_broker_url(url: str) -> str:
    """Whatever Celery's messaging library knows, several brokers with `;` between them."""
    for each in url.split(";"):
        try:
            parts = urlsplit(each)
            is_usable = parts.port is None or parts.port > 0
        except ValueError:
            raise ValueError(_BROKER) from None
        if not is_usable or parts.scheme.partition("+")[0] not in TRANSPORT_ALIASES:
            raise ValueError(_BROKER)
    return url
