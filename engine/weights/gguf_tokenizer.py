"""Rebuilds tokenizer.json from the vocabulary and merges that a GGUF file carries.

How text is cut before merging is not in the file; it is known by a name, and only names whose
rule is written below are converted.
"""

from collections.abc import Mapping

from engine.weights.gguf_metadata import GgufMetadata, GgufNotSupported

_CONTROL, _USER_DEFINED = 3, 4
_ORDINARY = {1, 5}

_BYTE_LEVEL: dict[str, object] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}

_PRE_TOKENIZERS: dict[str, dict[str, object]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


def tokenizer_files(metadata: GgufMetadata) -> Mapping[str, Mapping[str, object]]:
    """tokenizer.json and tokenizer_config.json by name. Raises GgufNotSupported."""
    model, pre = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre")
    if model != "gpt2":
        raise GgufNotSupported(f"Tokenizer model {model!r} is not converted; gpt2 is.")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise GgufNotSupported(f"Pre-tokenizer {pre!r} is not converted; {known} is.")
    metadata.require("tokenizer.ggml.add_space_prefix", False)
    texts = metadata.texts("tokenizer.ggml.tokens")
    added = _added_tokens(texts, metadata.integers("tokenizer.ggml.token_type"))
    definition: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": _bpe(texts, metadata.texts("tokenizer.ggml.merges")),
    }
    return {
        "tokenizer.json": definition,
        "tokenizer_config.json": _config(metadata, texts),
    }


def _added_tokens(texts: list[str], types: list[int]) -> list[dict[str, object]]:
    if len(types) != len(texts):
        raise GgufNotSupported(f"{len(texts)} tokens have {len(types)} types.")
    unknown = set(types) - _ORDINARY - {_CONTROL, _USER_DEFINED}
    if unknown:
        raise GgufNotSupported(f"Token types {sorted(unknown)} do not occur in gpt2 models.")
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for token_id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _bpe(texts: list[str], merges: list[str]) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: token_id for token_id, text in enumerate(texts)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }


def _config(metadata: GgufMetadata, texts: list[str]) -> dict[str, object]:
    def named(name: str) -> str | None:
        token_id = metadata.optional_integer(f"tokenizer.ggml.{name}_token_id")
        return texts[token_id] if token_id is not None else None

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": metadata.flag("tokenizer.ggml.add_bos_token", False),
        "add_eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
    }
