"""Names prefixes: one key per full block, chained, so that equal keys mean equal beginnings.

The chain starts at the cache scope, so a prefix of one scope never has a name in another. The
engine finds blocks in its KV cache by these keys, and whoever places requests can compute the
same ones.
"""

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 16


def root_key(cache_scope: str) -> bytes:
    """The key of the empty prefix in a scope; the parent of every first block there."""
    return hashlib.blake2b(cache_scope.encode(), digest_size=KEY_BYTES, person=b"scope").digest()


def child_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the prefix that `parent` names, continued by these tokens.

    128 bits of BLAKE2b over the parent's key and the tokens as 32-bit integers.
    """
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=KEY_BYTES).digest()


def block_keys(cache_scope: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of all full blocks at the beginning of `token_ids`, first to last."""
    keys = []
    key = root_key(cache_scope)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = child_key(key, token_ids[start : start + block_size])
        keys.append(key)
    return keys
