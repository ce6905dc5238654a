"""Our rendering against the reference's, for the features that published templates use."""

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.chat_template import (
    ChatToRender,
    TemplateRefusal,
    TemplateTooLong,
    compile_template,
    render_chat,
)
from tests.engine.text.conftest import NOW

MESSAGES = [
    {"role": "system", "content": "Be \u4f60 <b>brief</b>."},
    {"role": "user", "content": " Hi 'there'\n"},
    {"role": "assistant", "content": "Hello"},
]
CHAT = ChatToRender(messages=MESSAGES, now=NOW, special_texts={"bos_token": "<s>"})

TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}\n{% endfor %}",
    "{%- for m in messages -%}\n    {%- if loop.last %}{% break %}{% endif %}\n{{ m.content }}\n"
    "{%- endfor %}",
    "  {% if tools is none and not documents %}\n    plain\n  {% endif %}\nend",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "{% macro shout(t) %}{{ t | upper }}!{% endmacro %}{{ shout(messages[1].content) }}",
    "{{ dict(a=1) | tojson }} {{ range(3) | list }} {{ messages[9] is defined }}",
)


def rendered(source: str, max_chars: int = 10_000) -> str:
    return render_chat(compile_template(source), CHAT, max_chars)


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_writes_what_the_reference_writes(source: str) -> None:
    expected = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    texts: object = expected[0]
    assert [rendered(source)] == texts


def test_the_date_is_the_callers() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "09 Mar 2026"


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_the_sandbox_keeps_the_template_in(source: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        rendered(source)


def test_the_text_has_a_limit() -> None:
    with pytest.raises(TemplateTooLong):
        rendered("{% for i in range(100) %}{{ 'x' * 10 }}{% endfor %}", max_chars=500)


def test_a_render_leaves_the_callers_messages_alone() -> None:
    rendered("{% for m in messages %}{% set m = {} %}{% endfor %}")
    assert MESSAGES[2] == {"role": "assistant", "content": "Hello"}
