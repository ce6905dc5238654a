"""Renders a model's chat template.

Templates are programs that come with a model, so they run in Jinja2's immutable sandbox, with
the few names that published templates use. The sandbox keeps a template from Python's
internals; it does not bound time or memory, which is `template_process`'s part.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from engine.interface.chat_options import TemplateValue

_OURS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "strftime_now",
}


class TemplateRefusal(Exception):
    """The template called `raise_exception`: it does not accept these messages."""


class TemplateTooLong(Exception):
    """The text grew over the limit."""


@dataclass(frozen=True, slots=True)
class ChatToRender:
    """What a template sees.

    `special_texts` maps names such as "bos_token" to token strings. `now` is what
    `strftime_now` formats: the caller's clock, so that a render can be repeated. `options` are
    the template's own (`options_of`).
    """

    messages: Sequence[Mapping[str, str]]
    now: datetime
    add_generation_prompt: bool = True
    special_texts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, TemplateValue] = field(default_factory=dict)


def compile_template(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError."""
    return _environment().from_string(source)


def options_of(source: str) -> frozenset[str]:
    """The names that the template reads and that only a caller could set.

    Raises jinja2.TemplateSyntaxError.
    """
    read = jinja2.meta.find_undeclared_variables(_environment().parse(source))
    return frozenset(name for name in read - _OURS if not name.endswith("_token"))


def render_chat(template: jinja2.Template, chat: ChatToRender, max_chars: int) -> str:
    """The prompt text. Raises TemplateRefusal, TemplateTooLong, or whatever the template does."""
    pieces = []
    num_chars = 0
    # What is named later wins: an option can stand for nothing that is ours to say.
    names = {
        **chat.options,
        **chat.special_texts,
        "messages": [dict(message) for message in chat.messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": chat.add_generation_prompt,
        "strftime_now": chat.now.strftime,
    }
    for piece in template.generate(names):
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TemplateTooLong(f"The rendered text is longer than {max_chars} characters.")
        pieces.append(piece)
    return "".join(pieces)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    names: dict[str, object] = {
        "raise_exception": _raise_exception,
        "range": environment.globals["range"],
        "namespace": _Namespace,
        "dict": lambda **entries: entries,
    }
    environment.globals.clear()
    environment.globals.update(names)
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    environment.filters["tojson"] = _tojson
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Reaching for Python's internals is an error, not an empty string as Jinja2 has it."""

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(
            f"{attribute!r} of a {type(obj).__name__} is out of a template's reach."
        )


class _Namespace(jinja2.utils.Namespace):
    """Jinja2's namespace, without names that Python gives a meaning to."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"A namespace cannot hold {name!r}.")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    dumps = partial(json.dumps, ensure_ascii=ensure_ascii, indent=indent)
    return dumps(value, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja2's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)
