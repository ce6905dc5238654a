"""Where broker messages go that are no doorbell, and how Kombu is kept from tripping over them.

They lie, cut short, in a bounded list of the broker, if that is a Redis; with RabbitMQ they are
rejected, and a dead-letter exchange may catch them. Nothing of what they say is logged.
"""

import logging
from functools import cache

from celery.app.amqp import AMQP
from kombu.connection import Connection
from kombu.transport import redis as redis_transport
from kombu.utils.json import loads
from kombu.utils.objects import cached_property
from redis import Redis
from redis.exceptions import RedisError

DEAD_LETTERS = "headrace-batches-dead"
MAX_DEAD_LETTERS = 100
MAX_LETTER_CHARS = 4096

log = logging.getLogger(__name__)


def put_aside(channel: object, content: object, error: Exception) -> None:
    """Say that a message is put aside, and keep it if the channel can."""
    log.warning("a message that is no doorbell was put aside: %s", type(error).__name__)
    if isinstance(channel, GuardedChannel):
        try:
            channel.keep(repr(content)[:MAX_LETTER_CHARS])
        except (RedisError, OSError) as failure:
            log.warning("it could not be kept: %s", type(failure).__name__)


class GuardedChannel(redis_transport.Channel):
    """Reads from Redis what Kombu can make a message of; the rest never seems to have come."""

    @cached_property
    def client(self) -> Redis:
        """The client that waits for messages."""
        client: Redis = super().client
        client.set_response_callback("BRPOP", self._only_readable)
        return client

    def keep(self, letter: str) -> None:
        """Add to the dead letters; the oldest makes room."""
        with self.conn_or_acquire() as client, client.pipeline() as pipeline:
            pipeline.lpush(DEAD_LETTERS, letter.encode(errors="backslashreplace"))
            pipeline.ltrim(DEAD_LETTERS, 0, MAX_DEAD_LETTERS - 1)
            pipeline.execute()

    def _only_readable(
        self, reply: tuple[bytes, bytes] | None, **_: object
    ) -> tuple[bytes, bytes] | None:
        if not reply:
            return None
        try:
            self._read(reply[1])
        except Exception as error:  # noqa: BLE001 - Kombu would meet it, and catch nothing
            put_aside(self, reply[1], error)
            return None
        return reply

    def _read(self, entry: bytes) -> None:
        """Take the steps that Kombu will take."""
        envelope = loads(entry)  # type: ignore[no-untyped-call]  # Kombu has no types
        if "compression" in envelope.get("headers", ()):
            raise ValueError  # A doorbell is short; this may unpack to anything.
        message = self.Message(envelope, channel=self)  # type: ignore[no-untyped-call]  # Kombu has no types
        message.delivery_tag.encode()
        _ = message.delivery_info["exchange"], message.delivery_info["routing_key"]


class GuardedConnection(Connection):
    """A broker connection whose channels, on Redis, are guarded."""

    def get_transport_cls(self) -> type:
        """The transport that the URL names, guarded."""
        transport: type = super().get_transport_cls()  # type: ignore[no-untyped-call]  # Kombu has no types
        if issubclass(transport, redis_transport.Transport):
            return _guarded(transport)  # type: ignore[arg-type]  # a class can be hashed
        return transport


class GuardedAMQP(AMQP):  # type: ignore[misc]  # Celery has no types
    """Gives a Celery application guarded connections."""

    Connection = GuardedConnection


@cache
def _guarded(transport: type[redis_transport.Transport]) -> type:
    channel = type("Channel", (GuardedChannel, transport.Channel), {})
    return type("Transport", (transport,), {"Channel": channel})
