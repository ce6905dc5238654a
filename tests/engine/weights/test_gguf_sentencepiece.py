"""A vocabulary with scores cuts text as SentencePiece does: the best pair is joined first."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from engine.weights.gguf_folder import convert_gguf
from engine.weights.gguf_metadata import GgufNotSupported
from tests.engine.weights.small_gguf import random_weights, write_gguf

SPACE = "\u2581"
LETTERS = [SPACE, "a", "b", "c", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces() -> list[str]:
    """Letters and sixty random strings of them, in random order."""
    chooser = random.Random(2)
    longer = {"".join(chooser.choices(LETTERS, k=chooser.randrange(2, 5))) for _ in range(60)}
    found = sorted(longer)
    chooser.shuffle(found)
    return [*LETTERS, *found]


def folder_of(tmp_path: Path, **changes: object) -> Path:
    texts = ["<unk>", "<s>", "</s>", *BYTES, *pieces()]
    extra: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces()),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces()))],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": None,
    }
    extra |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    weights = random_weights(is_tied=True, vocab_size=len(texts))
    write_gguf(tmp_path / "small.gguf", weights, extra=extra)
    convert_gguf(tmp_path / "small.gguf", folder)
    return folder


def joined_by_score(text: str) -> list[str]:
    """SentencePiece's own procedure, the slow way."""
    scores = {piece: -rank for rank, piece in enumerate(pieces())}
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(score, place) for score, place in pairs if score is not None]
        if not known:
            return parts
        place = -max(known)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_text_is_joined_best_pair_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path))
    chooser = random.Random(5)
    for _ in range(200):
        text = "".join(chooser.choices(["a", "b", "c", "é", " "], k=chooser.randrange(1, 30)))
        ids = tokenizer.encode_plain(text)
        spoken = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert spoken == f" {text}"
        words = [tokenizer.token_bytes(i).decode().replace(" ", SPACE) for i in ids]
        assert words == joined_by_score(f" {text}")


def test_what_has_no_piece_is_spelled_in_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, add_space_prefix=False))
    ids = tokenizer.encode_plain("語")
    assert ids == tuple(3 + byte for byte in "語".encode())
    assert b"".join(map(tokenizer.token_bytes, ids)) == "語".encode()


def test_a_prompt_begins_with_bos_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(folder_of(tmp_path)).encode_prompt("a")[0] == 1
    folder = folder_of(tmp_path, add_bos_token=False)
    assert Tokenizer.from_folder(folder).encode_prompt("a")[0] != 1


def test_control_tokens_cannot_be_written_by_a_user(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path))
    assert not {0, 1, 2} & set(tokenizer.encode_plain("a<s>b</s><unk>"))


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("scores", [0.0], "have 1 scores"),
        ("scores", "none", "scores is not a list of numbers"),
        ("remove_extra_whitespaces", True, "remove_extra_whitespaces is True"),
        ("token_type", [9] * 324, r"Token types \[9\]|scores"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    name: str, value: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufNotSupported, match=named):
        folder_of(tmp_path, **{name: value})
