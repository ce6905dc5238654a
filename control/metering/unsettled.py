"""Settlements that wait in Redis because PostgreSQL was away when their requests ended."""

import logging
from typing import cast

import msgspec
import redis
from sqlalchemy import Engine

from control.metering.ending import close_request
from control.metering.settlement import Settlement, book_waste, waste_of
from control.registry.store import load_registry
from control.streams.keys import ModelKeys

PAGE = 500
MAX_DEAD_LETTERS = 1000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Settlement)

Entries = list[tuple[bytes, dict[bytes, bytes]]]

log = logging.getLogger(__name__)


def pack_settlement(settlement: Settlement) -> bytes:
    """The settlement as it waits in Redis."""
    return _encoder.encode(settlement)


def settle_late(database: Engine, client: redis.Redis) -> int:
    """Apply what waits, of every model, each in a transaction of its own. Returns how many.

    One that was applied and not removed, because somebody died in between, changes nothing the
    second time: its row is no longer held.
    """
    num_applied = 0
    with database.connect() as connection:
        models = load_registry(connection).models
    for model in models:
        keys = ModelKeys(model)
        while entries := cast(Entries, client.xrange(keys.unsettled, count=PAGE)):
            for entry_id, fields in entries:
                num_applied += _apply(database, client, keys, fields)
                client.xdel(keys.unsettled, entry_id)
    return num_applied


def _apply(
    database: Engine, client: redis.Redis, keys: ModelKeys, fields: dict[bytes, bytes]
) -> bool:
    data = fields.get(b"settlement", b"")
    try:
        settlement = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        log.error("dead letter in %s: %s", keys.unsettled, error)
        client.xadd(keys.dead, {"settlement": data[:4096]}, maxlen=MAX_DEAD_LETTERS)
        return False
    with database.begin() as connection:
        close_request(connection, settlement)
        book_waste(connection, waste_of(settlement))
    return True
