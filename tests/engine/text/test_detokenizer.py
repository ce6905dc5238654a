"""Streamed text equals whole text, wherever the stream was cut."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.corpus import CLEAN_TEXTS
from tests.engine.text.small_tokenizers import LEGACY_SPACE, definition, write_folder


def streamed(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The deltas when tokens come in groups of the given sizes, and the last flush."""
    detokenizer = Detokenizer(tokenizer)
    deltas, place = [], 0
    for size in [*sizes, len(token_ids)]:
        deltas.append(detokenizer.push(token_ids[place : place + size]))
        place += size
    return [*deltas, detokenizer.flush()]


@pytest.fixture(scope="module")
def ids_by_byte(tokenizer: Tokenizer) -> dict[int, int]:
    """The demo model's single-byte tokens; it lacks a few bytes that UTF-8 never uses."""
    singles = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return {byte: singles[bytes([byte])] for byte in range(256) if bytes([byte]) in singles}


@pytest.mark.parametrize("text", CLEAN_TEXTS)
def test_one_token_at_a_time_gives_the_text_back(text: str, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode_plain(text))
    assert "".join(streamed(tokenizer, ids, [1] * len(ids))) == text


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_bytes_in_any_steps_equal_the_whole_decode(
    data: st.DataObject,
    tokenizer: Tokenizer,
    reference: transformers.PreTrainedTokenizerFast,
    ids_by_byte: dict[int, int],
) -> None:
    # Beginnings of characters, cut short or wrongly continued, are where decoders differ.
    fragments = st.sampled_from(
        [b"\xe4\xbd\xa0", b"\xe4\xbd", b"\xe4", b"\xf0\x9f\x91\x8d", b"\xf0\x9f\x91", b"\xf0\x9f",
         b"\x80", b"\xed\xa0\x80", b"\xe0\x80", b"\xf4\x90\x80\x80", b"\xc3", b"a", b" "]
    )  # fmt: skip
    raw = b"".join(data.draw(st.lists(fragments | st.binary(max_size=3))))
    ids = [ids_by_byte[byte] for byte in raw if byte in ids_by_byte]
    sizes = data.draw(st.lists(st.integers(0, 4)))
    whole = bytes(byte for byte in raw if byte in ids_by_byte).decode(errors="replace")
    assert "".join(streamed(tokenizer, ids, sizes)) == whole
    assert reference.decode(ids, clean_up_tokenization_spaces=False) == whole


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_in_any_steps_equal_the_reference(
    data: st.DataObject, tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    sizes = data.draw(st.lists(st.integers(0, 5)))
    assert "".join(streamed(tokenizer, ids, sizes)) == reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_a_character_is_never_split_and_never_late(
    tokenizer: Tokenizer, ids_by_byte: dict[int, int]
) -> None:
    detokenizer = Detokenizer(tokenizer)
    family = "\U0001f468\u200d\U0001f469"
    shown = []
    for character in family:
        *head, last = (ids_by_byte[byte] for byte in character.encode())
        assert [detokenizer.push([token_id]) for token_id in head] == [""] * len(head)
        shown.append(detokenizer.push([last]))
    assert shown == list(family)
    assert detokenizer.flush() == ""


def test_invalid_bytes_then_a_space_are_replaced_without_error(
    tokenizer: Tokenizer, ids_by_byte: dict[int, int]
) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([ids_by_byte[0xE4]]) == ""
    assert detokenizer.push([ids_by_byte[ord(" ")]]) == "\ufffd "
    assert detokenizer.push([ids_by_byte[0xE4], ids_by_byte[0xBD]]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_have_no_text_even_inside_a_character(
    tokenizer: Tokenizer, ids_by_byte: dict[int, int]
) -> None:
    first, *rest = (ids_by_byte[byte] for byte in "\u4f60".encode())
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([first, 2, *rest, 0]) == "\u4f60"


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_style_text_equals_the_reference(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("small")
    write_folder(folder, definition(LEGACY_SPACE))
    tokenizer = Tokenizer.from_folder(folder)
    full = tokenizers.Tokenizer.from_str(json.dumps(definition(LEGACY_SPACE)))
    text = data.draw(st.text())
    ids = list(tokenizer.encode_plain(text))
    sizes = data.draw(st.lists(st.integers(0, 4)))
    assert "".join(streamed(tokenizer, ids, sizes)) == full.decode(ids)


def test_the_space_in_front_is_dropped_from_an_answer_and_kept_in_a_continuation(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode_plain("hello hello")
    assert Detokenizer(tokenizer).push(ids) == "hello hello"
    assert Detokenizer(tokenizer, at_start=False).push(ids) == " hello hello"
