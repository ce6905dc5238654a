"""How a request's tokens are shown as text. No token depends on it, so the engine ignores it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What whoever turns tokens into text has to know of the request.

    `continues_prompt`: the text goes on where the prompt ended, so a space that the first token
    begins with belongs to it; otherwise the text stands alone, as a chat answer does.
    `shows_special`: control tokens are shown by their names instead of being left out.
    `shows_stop`: the stop string or stop token that ended the output is part of the text.
    """

    continues_prompt: bool = False
    shows_special: bool = False
    shows_stop: bool = False
