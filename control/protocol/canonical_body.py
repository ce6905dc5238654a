"""What two bodies have in common that ask for the same: a hash of what they mean.

The order of members, blanks, and how a number is written make no difference, and neither does
whether the answer is streamed: a repetition may want it otherwise.
"""

import json
from collections.abc import Mapping
from hashlib import sha256

from control.protocol.json_body import NO_PARAM
from engine.interface.errors import InvalidRequest

HOW_TOLD = frozenset({"stream", "stream_options"})
LARGEST_EXACT = 2.0**53


def body_hash(fields: Mapping[str, object]) -> bytes:
    """The SHA-256 of a body's meaning. Raises InvalidRequest if it is nested too deeply."""
    meant = {name: value for name, value in fields.items() if name not in HOW_TOLD}
    try:
        text = json.dumps(_normal(meant), sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.", param=NO_PARAM) from error
    return sha256(text.encode()).digest()


def _normal(value: object) -> object:
    """The value with whole numbers written as such."""
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) <= LARGEST_EXACT
        return int(value) if is_whole else value
    if isinstance(value, dict):
        return {name: _normal(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_normal(member) for member in value]
    return value
