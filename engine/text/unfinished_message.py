"""A conversation whose last message the model is to go on with.

A template closes every message, and may strip it. So the message is given to it with an end mark,
a private character that occurs nowhere else, and what the template wrote from there on is cut
off. After the mark stands a space: where that is gone, the template strips messages, and so would
have stripped this one. This is how transformers does it, with a word in the mark's place.
"""

from dataclasses import dataclass

from engine.interface.errors import InvalidRequest
from engine.text.control_tokens import unused_marker

_PARAM = "continue_final_message"


@dataclass(frozen=True, slots=True)
class Marks:
    """Private characters of one conversation: one breaks up control tokens, one ends it."""

    breaker: str
    end: str

    @classmethod
    def unused_in(cls, texts: list[str]) -> "Marks | None":
        """Marks that occur in none of the texts; None if there are not enough."""
        breaker = unused_marker(texts)
        end = None if breaker is None else unused_marker([*texts, breaker])
        return None if breaker is None or end is None else cls(breaker, end)

    @property
    def end_of_unfinished(self) -> str:
        """What is put after the last message's text."""
        return self.end + " "

    def removed_from(self, text: str) -> str:
        """The text for people."""
        return text.replace(self.breaker, "").replace(self.end, "")


def check_continuable(role: str) -> None:
    """Raise InvalidRequest unless the model itself could have begun the message."""
    if role != "assistant":
        raise InvalidRequest(
            f"The last message must be the assistant's, to be continued; it is of role {role}.",
            param=_PARAM,
        )


def cut_after(prompt: str, unfinished: str, marks: Marks) -> str:
    """The prompt up to the end of the unfinished text.

    Raises InvalidRequest if the template does not write that text as it is.
    """
    place = prompt.rfind(marks.end)
    begun = prompt[: max(place, 0)]
    is_stripping = not prompt.startswith(marks.end_of_unfinished, place)
    if is_stripping and unfinished.strip():
        begun = begun[: _length_without_space(begun, marks.breaker)]
    # The template may have written the message more than once.
    begun = begun.replace(marks.end_of_unfinished, "").replace(marks.end, "")
    told = unfinished.strip() if is_stripping else unfinished.lstrip()
    if place < 0 or not _ends_with(begun, told, marks.breaker):
        raise InvalidRequest(
            "The model's chat template does not write the last message as it is, so that it cannot "
            "be continued.",
            param=_PARAM,
        )
    return begun


def _length_without_space(text: str, breaker: str) -> int:
    length = len(text)
    while length and (text[length - 1].isspace() or text[length - 1] == breaker):
        length -= 1
    return length


def _ends_with(text: str, ending: str, breaker: str) -> bool:
    """Whether the text ends so, breakers aside: there is at most one between two characters."""
    return text[-2 * len(ending) - 2 :].replace(breaker, "").endswith(ending)
