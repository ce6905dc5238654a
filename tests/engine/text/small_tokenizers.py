"""A tiny sentencepiece-style model folder, as Llama 2 and Mistral have them."""

import json
from pathlib import Path

_SPACE = "\u2581"
_CONTROL = ("<unk>", "<s>", "</s>")
_LETTERS = (_SPACE, *"abcdefghijklmnopqrstuvwxyz<>/[]INST.,!")
# "</s>" is reachable by merging: a tokenizer that kept it could be talked into it.
_MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), (_SPACE, "hell"), ("<", "/"), ("s", ">"),
           ("</", "s>"))  # fmt: skip

LEGACY_SPACE: dict[str, object] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": _SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        ],
    },
    "pre_tokenizer": None,
}

FIRST_SPACE: dict[str, object] = {
    "normalizer": None,
    "pre_tokenizer": {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "first",
        "split": False,
    },
}


def definition(space: dict[str, object]) -> dict[str, object]:
    """tokenizer.json of a byte-fallback BPE with the given treatment of spaces."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [*_CONTROL, *bytes_, *_LETTERS, *(a + b for a, b in _MERGES if a + b not in _CONTROL)]
    added = [
        {"id": i, "content": text, "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i, text in enumerate(_CONTROL)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **space,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: token_id for token_id, text in enumerate(texts)},
            "merges": [list(pair) for pair in _MERGES],
        },
    }


def write_folder(folder: Path, tokenizer: dict[str, object], template: str | None = None) -> None:
    """A folder with tokenizer.json, tokenizer_config.json and config.json."""
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
