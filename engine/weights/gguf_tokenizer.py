"""Rebuilds tokenizer.json from the vocabulary that a GGUF file carries.

Two kinds are converted: byte-level vocabularies with merges ("gpt2") and those of SentencePiece
with scores ("llama"). How the first kind cuts text before merging is not in the file; it is
known by a name, and only names whose rule is written below are converted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported
from engine.weights.gguf_sentencepiece import sentencepiece_parts

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ADDED = {_UNKNOWN, _CONTROL, _USER_DEFINED}
# Normal, unused, and single bytes.
_ORDINARY = {1, 5, 6}

_BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


@dataclass(frozen=True, slots=True)
class _TextRules:
    """How text is cut before merging. `ignores_merges`: whole words of the vocabulary stay whole.

    `adds_bos` is what a file that does not say means.
    """

    pre_tokenizer: dict[str, object]
    normalizer: dict[str, object] | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _cut_by(num_digits: str) -> dict[str, object]:
    """Words with one character in front, runs of digits, of other signs, and of white space."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + num_digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {
        "type": "Sequence",
        "pretokenizers": [{**split, "invert": False}, {**_BYTE_LEVEL, "use_regex": False}],
    }


_TEXT_RULES: Mapping[str, _TextRules] = {
    "smollm": _TextRules(
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
        }
    ),
    "qwen2": _TextRules(_cut_by(""), normalizer={"type": "NFC"}),
    "llama-bpe": _TextRules(_cut_by("{1,3}"), ignores_merges=True, adds_bos=True),
}


def tokenizer_files(metadata: GgufMetadata) -> Mapping[str, Mapping[str, object]]:
    """tokenizer.json and tokenizer_config.json by name. Raises GgufNotSupported."""
    texts = metadata.texts("tokenizer.ggml.tokens")
    match metadata.text("tokenizer.ggml.model"):
        case "gpt2":
            rules = _text_rules(metadata)
            parts, adds_bos = _byte_level_parts(metadata, texts, rules), rules.adds_bos
        case "llama":
            parts, adds_bos = sentencepiece_parts(metadata, texts), True
        case model:
            raise GgufNotSupported(
                f"Tokenizer model {model!r} is not converted; supported: gpt2, llama."
            )
    definition: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(texts, metadata.integers("tokenizer.ggml.token_type")),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": None,
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    return {
        "tokenizer.json": definition,
        "tokenizer_config.json": _config(metadata, texts, adds_bos),
    }


def _text_rules(metadata: GgufMetadata) -> _TextRules:
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in _TEXT_RULES:
        known = ", ".join(_TEXT_RULES)
        raise GgufNotSupported(f"Pre-tokenizer {pre!r} is not converted; supported: {known}.")
    return _TEXT_RULES[pre]


def _byte_level_parts(
    metadata: GgufMetadata, texts: list[str], rules: _TextRules
) -> dict[str, object]:
    metadata.require("tokenizer.ggml.add_space_prefix", False)
    return {
        "normalizer": rules.normalizer,
        "pre_tokenizer": rules.pre_tokenizer,
        "decoder": _BYTE_LEVEL,
        "model": _bpe(texts, metadata.texts("tokenizer.ggml.merges"), rules.ignores_merges),
    }


def _added_tokens(texts: list[str], types: list[int]) -> list[dict[str, object]]:
    if len(types) != len(texts):
        raise GgufNotSupported(f"{len(texts)} tokens have {len(types)} types.")
    unknown = set(types) - _ORDINARY - _ADDED
    if unknown:
        raise GgufNotSupported(f"Token types {sorted(unknown)} are not known.")
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in _ADDED
    ]


def _bpe(texts: list[str], merges: list[str], ignores_merges: bool) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignores_merges,
        "vocab": {text: token_id for token_id, text in enumerate(texts)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }


def _config(metadata: GgufMetadata, texts: list[str], adds_bos: bool) -> dict[str, object]:
    def named(name: str) -> str | None:
        token_id = metadata.optional_integer(f"tokenizer.ggml.{name}_token_id")
        return texts[token_id] if token_id is not None else None

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": metadata.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "add_eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer(
            f"{metadata.text('general.architecture')}.context_length"
        ),
    }
