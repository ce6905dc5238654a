"""What a caller wants to see of an answer, besides what was sampled anyway.

None of these fields changes a token. `Details` is what they come to, alike for both endpoints.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from control.protocol.strict_model import StrictModel, only
from engine.interface.text_options import TextOptions


@dataclass(frozen=True, slots=True)
class Details:
    """What an answer tells besides its words.

    `num_logprobs`, if not None, asks for the logprob of each token and for so many likeliest
    ones; `num_prompt_logprobs` asks for vLLM's `prompt_logprobs`. With `echo` the prompt is put
    before the words, and its logprobs before theirs. `names_by_id` calls tokens "token_id:7" in
    logprobs.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    names_by_id: bool = False


NO_DETAILS = Details()


class ShownFields(StrictModel):
    """Fields of both endpoints that say what is shown."""

    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    spaces_between_special_tokens: Annotated[Any, only(True)] = None

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed at each token; None for no logprobs."""
        return None

    @property
    def has_echo(self) -> bool:
        """Whether the prompt is part of the answer."""
        return False

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer's text goes on where the prompt's ended."""
        return False

    @property
    def details(self) -> Details:
        """What the answer tells besides its words."""
        return Details(
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            echo=self.has_echo,
            token_ids=bool(self.return_token_ids),
            names_by_id=bool(self.return_tokens_as_token_ids),
        )

    @property
    def text_options(self) -> TextOptions:
        """How the answer's tokens become text."""
        return TextOptions(
            continues_prompt=self.continues_prompt,
            shows_special=self.skip_special_tokens is False,
            shows_stop=bool(self.include_stop_str_in_output),
        )
