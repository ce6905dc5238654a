"""The parts of tokenizer.json for a vocabulary that was made by SentencePiece.

Such a file has no merges, only a score for each piece: of all pairs of neighbours that make a
piece, the best one is joined first. Written as merges in the order of those scores, that is what
byte-pair encoding does. Characters outside the vocabulary are spelled in bytes.
"""

from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported

_NORMAL = 1
_SPACE = "\u2581"


def sentencepiece_parts(metadata: GgufMetadata, texts: list[str]) -> dict[str, object]:
    """Normaliser, pre-tokeniser, decoder and model. Raises GgufNotSupported."""
    metadata.require("tokenizer.ggml.remove_extra_whitespaces", False)
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    decoders = [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    unknown = metadata.optional_integer("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, marked]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else texts[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: token_id for token_id, text in enumerate(texts)},
            "merges": _merges(metadata, texts),
        },
    }


def _merges(metadata: GgufMetadata, texts: list[str]) -> list[list[str]]:
    """Every way to join two pieces into a third, best third first."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    types = metadata.integers("tokenizer.ggml.token_type")
    if not len(scores) == len(types) == len(texts):
        raise GgufNotSupported(f"{len(texts)} tokens have {len(scores)} scores.")
    pieces = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind == _NORMAL
    }
    merges = []
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges += [list(pair) for pair in known]
    return merges
