"""Text to token ids, with a wall between text and control tokens.

The tokenizer that meets users' text is built without the model's added tokens: not in its
matcher, not in its vocabulary, not as the result of a merge. So no text, however it is
written, can become a control token; those enter a prompt by id, from the template alone.
"""

import json
from pathlib import Path

import tokenizers

from engine.text.token_bytes import token_bytes_rule
from engine.text.tokenizer_files import (
    AddedToken,
    JsonObject,
    TokenizerFiles,
    TokenizerNotSupported,
    as_object,
)

# Normalisers may make text shorter before it is cut into tokens: three Hangul letters of nine
# bytes compose into one of three, and a typed U+2581 counts as one space.
_MOST_SHRINKING = 3

_NORMALIZERS = {"NFC", "Prepend", "Replace", "Sequence"}


class Tokenizer:
    """One model's tokenizer. Immutable and safe to share between threads.

    `eos_token_ids` end a sequence. `vocab_size` bounds every id the model can take or give.
    `longest_token_bytes` is the most bytes of text that one token can stand for.
    `strips_leading_space` says that decoded text loses one space in front.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        model = as_object(files.definition.get("model"), "model in tokenizer.json")
        if model.get("type", "BPE") != "BPE":
            raise TokenizerNotSupported(f"Tokenizer model {model.get('type')!r} is not served.")
        _check_normalizer(files.definition.get("normalizer"))
        to_bytes, self.strips_leading_space = token_bytes_rule(files.definition.get("decoder"))
        self.added_tokens: tuple[AddedToken, ...] = files.added_tokens
        self.special_texts = dict(files.special_texts)
        self.special_ids = frozenset(t.token_id for t in files.added_tokens if t.special)
        self.eos_token_ids = files.eos_token_ids
        self.chat_template = files.chat_template
        plain = _without_added_tokens(files)
        inside = _without_first_space(plain)
        self._plain = _build(plain)
        self._plain_inside = _build(inside) if inside is not plain else self._plain
        vocab = as_object(model.get("vocab"), "vocab in tokenizer.json")
        texts = {token_id: text for text, token_id in vocab.items() if isinstance(token_id, int)}
        texts.update((token.token_id, token.text) for token in files.added_tokens)
        self.vocab_size = files.model_vocab_size or max(texts) + 1
        self._bytes = [
            to_bytes(texts[token_id]) if token_id in texts else b""
            for token_id in range(max(self.vocab_size, max(texts) + 1))
        ]
        self.longest_token_bytes = max(map(len, self._bytes)) * _shrinking(files.definition)
        self._prefix, self._suffix = _special_frame(files)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Load a model folder's tokenizer. Raises TokenizerNotSupported with the reason."""
        return cls(TokenizerFiles.read(folder))

    def encode_plain(self, text: str, *, at_start: bool = True) -> tuple[int, ...]:
        """Token ids of the text, never a control token's.

        `at_start` is False for text that follows a control token in the same prompt:
        sentencepiece-style tokenizers put a space only in front of the first text.
        """
        tokenizer = self._plain if at_start else self._plain_inside
        # The batch form runs without the interpreter's lock; the single form does not.
        return tuple(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a raw completion prompt, with the tokenizer's own BOS rule if asked."""
        plain = self.encode_plain(text)
        return self._prefix + plain + self._suffix if add_special_tokens else plain

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a control token's are those of its name.

        An id that the model can give but the tokenizer does not know has no bytes.
        """
        return self._bytes[token_id]


def _check_normalizer(normalizer: object) -> None:
    if normalizer is None:
        return
    entry = as_object(normalizer, "normalizer in tokenizer.json")
    if entry.get("type") not in _NORMALIZERS:
        raise TokenizerNotSupported(f"Normalizer {entry.get('type')!r} is not served.")
    parts = entry.get("normalizers") or []
    for part in parts if isinstance(parts, list) else []:
        _check_normalizer(part)


def _shrinking(definition: JsonObject) -> int:
    decoder = as_object(definition.get("decoder"), "decoder in tokenizer.json")
    keeps_bytes = decoder.get("type") == "ByteLevel" and definition.get("normalizer") is None
    return 1 if keeps_bytes else _MOST_SHRINKING


def _build(definition: JsonObject) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    # The binding raises bare Exception for every malformed definition.
    except Exception as error:
        raise TokenizerNotSupported(f"tokenizer.json cannot be used: {error}") from error


def _without_added_tokens(files: TokenizerFiles) -> JsonObject:
    """The definition with every trace of the added tokens taken out."""
    added = {token.text for token in files.added_tokens}
    model = dict(as_object(files.definition["model"], "model in tokenizer.json"))
    vocab = as_object(model["vocab"], "vocab in tokenizer.json")
    model["vocab"] = {text: token_id for text, token_id in vocab.items() if text not in added}
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        raise TokenizerNotSupported("merges in tokenizer.json must be a list.")
    model["merges"] = [merge for merge in merges if added.isdisjoint(_merge_texts(merge))]
    if model.get("unk_token") in added:
        model["unk_token"] = None
    dropped: JsonObject = {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return {**files.definition, **dropped, "model": model}


def _merge_texts(merge: object) -> tuple[str, str, str]:
    pair = merge.split(" ", 1) if isinstance(merge, str) else merge
    if not isinstance(pair, list) or len(pair) != 2:
        raise TokenizerNotSupported(f"Merge {merge!r} in tokenizer.json is not a pair.")
    left, right = str(pair[0]), str(pair[1])
    return left, right, left + right


def _without_first_space(definition: JsonObject) -> JsonObject:
    """The same rules for text that is not the first of its prompt."""
    pre_tokenizer = definition.get("pre_tokenizer")
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("prepend_scheme") == "first":
        return {**definition, "pre_tokenizer": {**pre_tokenizer, "prepend_scheme": "never"}}
    return definition


def _special_frame(files: TokenizerFiles) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids put before and after a raw prompt."""
    if files.adds_bos is not None:
        by_text = {token.text: token.token_id for token in files.added_tokens}
        bos = by_text.get(files.special_texts.get("bos_token", ""))
        eos = by_text.get(files.special_texts.get("eos_token", ""))
        prefix = (bos,) if files.adds_bos and bos is not None else ()
        return prefix, (eos,) if files.adds_eos and eos is not None else ()
    full = _build(files.definition)
    framed = full.encode("a", add_special_tokens=True).ids
    bare = full.encode("a", add_special_tokens=False).ids
    start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return tuple(framed[:start]), tuple(framed[start + len(bare) :])
