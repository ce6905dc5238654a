"""A model's own options for its chat template, as a caller may set them.

Templates come from the registry alone and run under limits; here is bounded what they are fed. No
number is so large that a loop over it would take long, and no text so long that it matters.
Whether the model's template reads an option of that name is found out when it is rendered.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator

from control.protocol.strict_model import invalid

MAX_OPTIONS = 16
MAX_NAME_CHARS = 40
MAX_TEXT_CHARS = 256
MAX_NUMBER = 1_000_000


def _check_options(options: object) -> object:
    if not isinstance(options, dict):
        raise invalid("Must be an object of options.")
    if len(options) > MAX_OPTIONS:
        raise invalid(f"Holds at most {MAX_OPTIONS} options.")
    for name, value in options.items():
        if not (name.isidentifier() and name.isascii() and len(name) <= MAX_NAME_CHARS):
            raise invalid(f"Options are named by identifiers of at most {MAX_NAME_CHARS} letters.")
        if not _is_small(value):
            raise invalid(
                "Must be true, false, null, an integer of at most a million, or a text of at most "
                f"{MAX_TEXT_CHARS} characters.",
                f"chat_template_kwargs.{name}",
            )
    return options


def _is_small(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_CHARS
    return value is None or (isinstance(value, int) and abs(value) <= MAX_NUMBER)


TemplateOptions = Annotated[dict[str, Any], BeforeValidator(_check_options)]
