"""How a conversation is to be written down for the model, besides its messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TemplateValue = bool | int | str | None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat template is told, in transformers' words.

    With `add_generation_prompt` the prompt ends with the opening of the assistant's next message,
    with `continue_final_message` in the middle of the last one; never both. `template_kwargs` are
    a model's own options, such as `enable_thinking`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
