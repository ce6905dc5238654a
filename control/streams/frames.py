"""Deltas as bytes: a log or a feed entry is frames, one after another.

A frame is four bytes of big-endian length and a msgpack GenerationDelta, so that Redis can
concatenate what it does not understand.
"""

from collections.abc import Iterable, Iterator

import msgspec

from engine.interface.generation_delta import GenerationDelta

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GenerationDelta)


def pack_frames(deltas: Iterable[GenerationDelta]) -> bytes:
    """The deltas' frames, concatenated."""
    parts = []
    for delta in deltas:
        body = _encoder.encode(delta)
        parts.append(len(body).to_bytes(4, "big") + body)
    return b"".join(parts)


def unpack_frames(data: bytes) -> Iterator[GenerationDelta]:
    """The deltas in the order they were packed. Raises ValueError on a torn frame."""
    start = 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "big")
        if end > len(data):
            raise ValueError(f"torn frame at byte {start} of {len(data)}")
        yield _decoder.decode(data[start + 4 : end])
        start = end
