"""The bytes each token stands for.

Two spellings exist in the model families served. Byte-level BPE writes every byte as one
printable character; sentencepiece style writes a space as U+2581 and rare bytes as `<0x0A>`.
Which one applies is read from the decoder in tokenizer.json; any other decoder is refused by
name, because text made by the wrong rule would be quietly wrong.
"""

import re
from collections.abc import Callable

from engine.text.tokenizer_files import JsonObject, TokenizerNotSupported, as_object

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


def token_bytes_rule(decoder: object) -> tuple[Callable[[str], bytes], bool]:
    """How a vocabulary string becomes bytes, and whether decoding drops one leading space.

    `decoder` is the "decoder" entry of tokenizer.json. Raises TokenizerNotSupported.
    """
    entry = as_object(decoder, "decoder in tokenizer.json")
    if entry.get("type") == "ByteLevel":
        return _byte_level_rule(), False
    parts = entry.get("decoders") if entry.get("type") == "Sequence" else None
    if not isinstance(parts, list):
        raise TokenizerNotSupported(f"Decoder {entry.get('type')!r} is not served.")
    return _sentencepiece_bytes, _check_sentencepiece(parts)


def byte_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level BPE and the byte each stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, were given
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return alphabet


def _byte_level_rule() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def to_bytes(text: str) -> bytes:
        try:
            return bytes(alphabet[character] for character in text)
        except KeyError:
            # Added tokens are written as they read, so they may use characters outside.
            return text.encode()

    return to_bytes


def _sentencepiece_bytes(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE_MARK, " ").encode()


def _check_sentencepiece(parts: list[JsonObject]) -> bool:
    """Accept exactly: spaces restored, bytes restored, fused, perhaps one space stripped."""
    kinds = [str(part.get("type")) for part in parts]
    if kinds not in (["Replace", "ByteFallback", "Fuse"], _WITH_STRIP):
        raise TokenizerNotSupported(f"Decoder sequence {kinds} is not served.")
    if parts[0].get("pattern") != {"String": _SPACE_MARK} or parts[0].get("content") != " ":
        raise TokenizerNotSupported(f"Decoder part {parts[0]} is not served.")
    if kinds != _WITH_STRIP:
        return False
    strip = (parts[3].get("content"), parts[3].get("start"), parts[3].get("stop"))
    if strip != (" ", 1, 0):
        raise TokenizerNotSupported(f"Decoder part {parts[3]} is not served.")
    return True


_WITH_STRIP = ["Replace", "ByteFallback", "Fuse", "Strip"]
