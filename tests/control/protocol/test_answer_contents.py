"""What an answer shows of a choice that a deadline cut before it began."""

from collections.abc import Iterable

import pytest

from control.protocol.answer_contents import AnswerContents
from control.protocol.answer_form import AnswerForm
from control.protocol.responses import FinishedChoice
from control.protocol.shown_fields import Details
from engine.interface.generation_delta import FinishReason
from engine.interface.token_logprobs import TokenLogprob

PROMPT = (1, 2, 3)
SCORES = (TokenLogprob(-1.0), TokenLogprob(-2.0))


class Letters:
    """A model whose token n is the nth letter."""

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([96 + token_id])

    def answer(self) -> "Letters":
        return self

    def prompt(self) -> "Letters":
        return self

    def push(self, token_ids: Iterable[int], /) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()

    def prompt_text(self, token_ids: Iterable[int], /) -> str:
        return self.push(token_ids)


def shown(
    details: Details, scores: tuple[TokenLogprob, ...] | None, prompt_texts: list[str] | None
) -> dict[str, object]:
    form = AnswerForm(
        is_chat=prompt_texts is None,
        details=details,
        prompts=(PROMPT,),
        prompt_texts=tuple(prompt_texts or ()),
    )
    contents = AnswerContents(form, Letters())
    cut = FinishedChoice(0, "", FinishReason.LENGTH, (), (), scores)
    if prompt_texts is None:
        return contents.members_of_all([cut])
    return contents.show(cut).members


@pytest.mark.parametrize(
    ("scores", "expected"), [(SCORES, [None, -1.0, -2.0]), (None, [None, None, None])]
)
def test_an_echoed_prompt_has_an_entry_per_token_also_if_it_was_never_scored(
    scores: tuple[TokenLogprob, ...] | None, expected: list[float | None]
) -> None:
    members = shown(Details(num_logprobs=0, echo=True), scores, ["abc"])
    logprobs = members["logprobs"]
    assert isinstance(logprobs, dict)
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == expected
    assert logprobs["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("prompt_texts", [None, ["abc"]], ids=["chat", "completion"])
@pytest.mark.parametrize(("scores", "num_told"), [(SCORES, 2), (None, 0)])
def test_prompt_logprobs_have_an_entry_per_token_also_if_they_were_never_made(
    scores: tuple[TokenLogprob, ...] | None, num_told: int, prompt_texts: list[str] | None
) -> None:
    entries = shown(Details(num_prompt_logprobs=0), scores, prompt_texts)["prompt_logprobs"]
    assert isinstance(entries, list)
    assert len(entries) == len(PROMPT)
    assert sum(entry is not None for entry in entries) == num_told
