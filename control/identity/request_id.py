"""Request ids: minted by us, never taken from a caller.

    | 32 bits: creation second | 98 bits: random |   -> 26 characters of base 32

The second at the front lets an id alone find its partition (`created_at`), and the random part
is far beyond guessing. Letters and digits are Crockford's, without i, l, o and u.
"""

from datetime import UTC, datetime

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
NUM_RANDOM_BITS = 98
LENGTH = 26

_VALUES = {letter: value for value, letter in enumerate(ALPHABET)}


def mint_request_id(now_s: float, random_bits: int) -> str:
    """The id for a request created at `now_s` (seconds UTC) from 98 random bits."""
    assert 0 <= random_bits < 2**NUM_RANDOM_BITS
    number = ((int(now_s) & 0xFFFFFFFF) << NUM_RANDOM_BITS) | random_bits
    letters = []
    for _ in range(LENGTH):
        letters.append(ALPHABET[number & 31])
        number >>= 5
    return "".join(reversed(letters))


def created_at_of(request_id: str) -> datetime:
    """The creation second inside an id. Raises ValueError if this is no id of ours."""
    if not is_request_id(request_id):
        raise ValueError("not a request id")
    number = 0
    for letter in request_id:
        number = (number << 5) | _VALUES[letter]
    return datetime.fromtimestamp(number >> NUM_RANDOM_BITS, UTC)


def is_request_id(text: str) -> bool:
    """Whether the text could be an id of ours."""
    return len(text) == LENGTH and all(letter in _VALUES for letter in text)
