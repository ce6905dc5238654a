"""Deltas as bytes: a log or a feed entry is frames, one after another.

A frame is four bytes of big-endian length and a delta's fields in their order, as a msgpack
array: Redis can concatenate what it does not understand, and a token costs it 46 bytes or so,
where the fields' names would make it 150.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from types import GenericAlias
from typing import get_type_hints

import msgspec

from engine.interface.generation_delta import GenerationDelta

_NAMES = [field.name for field in fields(GenerationDelta)]
_TYPES = get_type_hints(GenerationDelta)
_values_of = attrgetter(*_NAMES)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GenericAlias(tuple, tuple(_TYPES[name] for name in _NAMES)))


def pack_frames(deltas: Iterable[GenerationDelta]) -> bytes:
    """The deltas' frames, concatenated."""
    parts = []
    for delta in deltas:
        body = _encoder.encode(_values_of(delta))
        parts.append(len(body).to_bytes(4, "big") + body)
    return b"".join(parts)


def unpack_frames(data: bytes) -> Iterator[GenerationDelta]:
    """The deltas in the order they were packed. Raises ValueError on a torn frame."""
    start = 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        if end > len(data):
            raise ValueError(f"torn frame at byte {start} of {len(data)}")
        yield GenerationDelta(*_decoder.decode(data[start + 4 : end]))
        start = end
