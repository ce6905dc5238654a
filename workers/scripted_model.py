"""A model folder for test builds: it says its prompt back, byte by byte, then stops.

It goes through everything a real one does (manifest, registry, tokenizer, template, replica),
so that whoever tests the service chooses every token by choosing the prompt. Its tokens are the
256 bytes and three control tokens.
"""

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from control.registry.manifest import ManifestError, verify_manifest, write_manifest

SCRIPTED_MODEL = "scripted"
SCRIPTED_VERSION = "v1"
MAX_MODEL_LEN = 8192

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_scripted_model(weight_store: Path) -> Path:
    """The scripted model's folder in the weight store; written if it is not there intact."""
    folder = weight_store / SCRIPTED_MODEL / SCRIPTED_VERSION
    try:
        verify_manifest(folder)
    except (ManifestError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _files().items():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        save_file({"nothing": numpy.zeros(1, dtype=numpy.float32)}, folder / "model.safetensors")
        write_manifest(folder)
    return folder


def is_scripted(folder: Path) -> bool:
    """True if the folder is a scripted model's."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("model_type") == SCRIPTED_MODEL)


def _files() -> dict[str, object]:
    vocab_size = 256 + len(CONTROL_TOKENS)
    return {
        "config.json": {
            "model_type": SCRIPTED_MODEL,
            "vocab_size": vocab_size,
            "max_position_embeddings": MAX_MODEL_LEN,
            "eos_token_id": EOS_TOKEN_ID,
        },
        "tokenizer_config.json": {
            "eos_token": CONTROL_TOKENS[2],
            "bos_token": CONTROL_TOKENS[0],
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "tokenizer.json": _tokenizer(),
    }


def _tokenizer() -> dict[str, object]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + number,
                "content": text,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for number, text in enumerate(CONTROL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {letter: number for number, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, num_moved = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + num_moved))
            num_moved += 1
    return letters
