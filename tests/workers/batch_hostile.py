"""Entries of the broker's list that are almost doorbells: one thing is wrong with each."""

import base64
import json
import zlib
from collections.abc import Mapping

from control.batches.doorbell import TASK

MARK = "mark-of-a-stranger"
BATCH_ID = "batch_" + "0" * 26
ID = "11111111-1111-1111-1111-111111111111"


def envelope(
    headers: Mapping[str, object] | None = None,
    body: str | None = None,
    encoding: str = "base64",
) -> bytes:
    """A doorbell as Kombu stores it, but for what is given. `body` is given as it travels."""
    headers = headers or {}
    if body is None:
        body = coded([[BATCH_ID], {}, {"callbacks": None}])
    delivery = {"exchange": "", "routing_key": "headrace-batches"}
    return json.dumps(
        {
            "body": body,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"lang": "py", "task": TASK, "id": ID, "note": MARK, **headers},
            "properties": {
                "delivery_info": delivery,
                "priority": 0,
                "body_encoding": encoding,
                "delivery_tag": str(hash((body, *map(str, headers.items())))),
            },
        }
    ).encode()


def coded(value: object) -> str:
    """The value as a body."""
    return base64.b64encode(json.dumps(value).encode()).decode()


def hostile_bodies() -> list[str]:
    """Bodies that Kombu makes a message of."""
    callback = {"callbacks": [{"task": TASK, "args": [MARK]}]}
    return [
        "@@@@",
        "",
        coded(MARK),
        coded([]),
        coded({"task": TASK, "args": 5}),
        coded([[1, 2, 3], {}, {}]),
        coded([[MARK], {}, {}]),
        coded([[BATCH_ID], {MARK: 1}, {}]),
        coded([[BATCH_ID], {}, callback]),
        coded([[BATCH_ID], {}, []]),
    ]


def hostile_headers() -> list[dict[str, object]]:
    """Headers that Kombu makes a message of."""
    return [
        {"task": []},
        {"task": MARK},
        {"id": []},
        {"id": MARK},
        {"id": ID + "\n"},
        {"eta": MARK},
        {"eta": "2999-01-01T00:00:00"},
        {"expires": MARK},
        {"timelimit": ["a", "b"]},
        {"timelimit": 5},
    ]


def hostile_entries() -> list[bytes]:
    """All of it, and what Kombu cannot make a message of."""
    squeezed = base64.b64encode(zlib.compress(b"[]")).decode()
    plain = json.loads(envelope())
    wrong: tuple[object, ...] = (None, 5, [], "\ud800")
    entries = [envelope(body=body) for body in hostile_bodies()]
    entries += [envelope(headers) for headers in hostile_headers()]
    entries += [envelope({"compression": "application/x-gzip"}, squeezed)]
    entries += [envelope(encoding=MARK), envelope(body="%%%", encoding="utf-8")]
    for key in ("delivery_tag", "delivery_info"):
        for value in wrong:
            properties = plain["properties"] | {key: value}
            entries.append(json.dumps(plain | {"properties": properties}).encode())
    entries += [json.dumps(plain | {"headers": value}).encode() for value in (None, MARK, [MARK])]
    entries += [MARK.encode(), b"garbage\x00", b"\xff\xfe", b'"x"', b"[]", b"5", b"null", b"{}"]
    return [*entries, b"[" * 100_000, b'{"body":"x"}', b'{"__type__":"uuid","__value__":"x"}']
