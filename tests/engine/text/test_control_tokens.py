"""Markers keep control-token strings out of users' text and vanish without a trace."""

from hypothesis import given
from hypothesis import strategies as st

from engine.text.control_tokens import ControlTokens, unused_marker
from engine.text.tokenizer_files import AddedToken

MARKER = "\ue000"
TEXTS = ("<s>", "<|end|>", "<|endless|>", "aab", "aa<", "[TOOL 1]", "[TOOL 12]")
CONTROL = ControlTokens(AddedToken(i, text, special=True) for i, text in enumerate(TEXTS))

# Halves of tokens, whole ones and their letters: what an attacker would type.
hostile_texts = st.lists(
    st.sampled_from([*TEXTS, "<|", "end|>", "less", "<", ">", "s", "a", "b", "[TOOL", " 1", "2]"])
).map("".join)


@given(text=hostile_texts)
def test_a_broken_text_holds_no_token_and_is_restored_by_removing_markers(text: str) -> None:
    broken = CONTROL.break_up(text, MARKER)
    assert not any(token in broken for token in TEXTS)
    assert broken.replace(MARKER, "") == text


@given(texts=st.lists(hostile_texts, max_size=4))
def test_nothing_forms_where_broken_texts_touch(texts: list[str]) -> None:
    prompt = "".join(CONTROL.break_up(text, MARKER) for text in texts)
    (segment,) = CONTROL.split(prompt, MARKER)
    assert segment.token is None
    assert segment.text == "".join(texts)


@given(text=hostile_texts, before=st.sampled_from(TEXTS), after=st.sampled_from(TEXTS))
def test_the_templates_own_tokens_are_found_and_the_text_between_is_whole(
    text: str, before: str, after: str
) -> None:
    prompt = before + CONTROL.break_up(text, MARKER) + after
    segments = list(CONTROL.split(prompt, MARKER))
    assert [segment.token.text for segment in segments if segment.token] == [before, after]
    assert segments[1].text == text


def test_the_rest_of_a_token_in_the_template_cannot_complete_a_text() -> None:
    for text in ("<|", "end|>", "end", "|"):
        prompt = f"<|{CONTROL.break_up(text, MARKER)}|>"
        assert [segment.token for segment in CONTROL.split(prompt, MARKER)] == [None]


def test_the_longest_token_at_a_place_wins() -> None:
    found = [s.token.text for s in CONTROL.split("[TOOL 12][TOOL 1]<|endless|>", MARKER) if s.token]
    assert found == ["[TOOL 12]", "[TOOL 1]", "<|endless|>"]


def test_a_token_may_swallow_the_space_beside_it() -> None:
    token = AddedToken(0, "<mid>", special=True, eats_left=True, eats_right=True)
    texts = [segment.text for segment in ControlTokens([token]).split("a  <mid> \n b", MARKER)]
    assert texts == ["a", "b"]


def test_a_model_without_control_tokens_needs_no_markers() -> None:
    control = ControlTokens([])
    assert control.break_up("<s>", MARKER) == "<s>"
    assert [segment.text for segment in control.split("a<s>", MARKER)] == ["a<s>"]


def test_the_marker_occurs_in_no_text() -> None:
    assert unused_marker(["plain"]) == "\ue000"
    assert unused_marker(["\ue000", "x\ue001"]) == "\ue002"
    area = "".join(map(chr, range(0xE000, 0xF900)))
    assert unused_marker([area]) == "\U000f0000"
    rest = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    assert unused_marker([area, rest]) is None
