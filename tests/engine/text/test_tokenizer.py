"""Ids equal the reference's for ordinary text, and control tokens stay out of all text."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerNotSupported
from tests.engine.text.corpus import CLEAN_TEXTS
from tests.engine.text.small_tokenizers import (
    FIRST_SPACE,
    LEGACY_SPACE,
    definition,
    write_folder,
)

CONTROL_TEXTS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>")


@pytest.mark.parametrize("text", CLEAN_TEXTS)
def test_ids_of_clean_text_equal_the_reference(
    text: str, tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast
) -> None:
    assert list(tokenizer.encode_prompt(text)) == reference(text)["input_ids"]
    assert list(tokenizer.encode_plain(text)) == reference.encode(text, add_special_tokens=False)


@given(text=st.text())
@settings(max_examples=300, deadline=None)
def test_ids_of_any_clean_text_equal_the_reference(
    text: str, tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerFast
) -> None:
    # The reference reads a control token in the text; ours never does (the next test).
    assume(not any(token.text in text for token in tokenizer.added_tokens))
    assert list(tokenizer.encode_plain(text)) == reference.encode(text, add_special_tokens=False)


@given(pieces=st.lists(st.sampled_from(CONTROL_TEXTS) | st.text(alphabet="<|>im_endstart \n")))
@settings(max_examples=300, deadline=None)
def test_no_text_becomes_a_control_token(pieces: list[str], tokenizer: Tokenizer) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode_plain(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_every_control_token_of_the_model_is_plain_text_when_typed(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.added_tokens) == 17
    for token in tokenizer.added_tokens:
        for at_start in (True, False):
            ids = tokenizer.encode_plain(token.text, at_start=at_start)
            assert len(ids) > 1
            assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("space", [LEGACY_SPACE, FIRST_SPACE], ids=["legacy", "first"])
@pytest.mark.parametrize("text", ["</s>", "<s>", "<unk>", "a</s>b", " </s>", "\u4f60</s>"])
def test_merges_that_would_make_a_control_token_are_gone(
    space: dict[str, object], text: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, definition(space))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode_plain(text)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() in (text, " " + text)


def test_a_vocabulary_that_knows_whole_words_still_hides_control_tokens(tmp_path: Path) -> None:
    made = definition(FIRST_SPACE)
    model = made["model"]
    assert isinstance(model, dict)
    made["model"] = {**model, "ignore_merges": True}
    made["pre_tokenizer"] = None
    write_folder(tmp_path, made)
    full = tokenizers.Tokenizer.from_str(json.dumps({**made, "added_tokens": []}))
    assert full.encode("</s>", add_special_tokens=False).ids == [2]
    assert 2 not in Tokenizer.from_folder(tmp_path).encode_plain("</s>")


@pytest.mark.parametrize("space", [LEGACY_SPACE, FIRST_SPACE], ids=["legacy", "first"])
@pytest.mark.parametrize("text", ["hello", " hello all", "", "\u4f60!", "hell \u2581 a"])
def test_sentencepiece_style_ids_and_bos_equal_the_reference(
    space: dict[str, object], text: str, tmp_path: Path
) -> None:
    made = definition(space)
    write_folder(tmp_path, made)
    tokenizer = Tokenizer.from_folder(tmp_path)
    full = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert list(tokenizer.encode_prompt(text)) == full.encode(text).ids
    assert tokenizer.encode_prompt(text)[0] == 1
    assert list(tokenizer.encode_prompt(text, add_special_tokens=False)) == (
        full.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize(
    ("stated", "prefix", "suffix"),
    [
        ({"add_bos_token": True}, (1,), ()),
        ({"add_bos_token": False}, (), ()),
        ({"add_bos_token": True, "add_eos_token": True}, (1,), (2,)),
    ],
)
def test_flags_in_the_config_overrule_the_post_processor(
    stated: dict[str, bool], prefix: tuple[int, ...], suffix: tuple[int, ...], tmp_path: Path
) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stated}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    plain = tokenizer.encode_plain("hello")
    assert tokenizer.encode_prompt("hello") == prefix + plain + suffix


def test_the_demo_model_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.longest_token_bytes == 81
    assert tokenizer.special_texts["bos_token"] == "<|im_start|>"


def test_every_end_of_sequence_counts(tmp_path: Path) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {2, 7, 9}


def test_ids_beyond_the_vocabulary_have_no_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE))
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.token_bytes(999) == b""


def test_a_separate_template_file_wins(tmp_path: Path) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE), template="old")
    assert Tokenizer.from_folder(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_folder(tmp_path).chat_template == "new"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "CTC"}]}}, "CTC"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
        ({"normalizer": {"type": "NFKC"}}, "NFKC"),
        ({"added_tokens": [{"id": 0, "content": "\n"}]}, r"\\n"),
        ({"added_tokens": [{"id": 0, "content": "word", "single_word": True}]}, "single_word"),
    ],
)
def test_what_would_be_quietly_wrong_is_refused_by_name(
    change: dict[str, object], named: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, {**definition(LEGACY_SPACE), **change})
    with pytest.raises(TokenizerNotSupported, match=named):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotSupported, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_code_beside_the_tokenizer_is_never_imported(tmp_path: Path) -> None:
    write_folder(tmp_path, definition(LEGACY_SPACE))
    canary = tmp_path / "imported"
    (tmp_path / "canary.py").write_text(f"open({str(canary)!r}, 'w').close()")
    config = {"auto_map": {"AutoTokenizer": ["canary.Canary", None]}, "tokenizer_class": "Canary"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    Tokenizer.from_folder(tmp_path)
    assert not canary.exists()
