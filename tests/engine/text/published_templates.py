"""Chat templates in the manner of published families, and the control tokens that they use."""

from typing import NamedTuple


class Family(NamedTuple):
    """A template and its control tokens; the last one ends a message."""

    template: str
    control: tuple[str, ...]


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = Family(
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    _CHATML_TOKENS,
)

# Takes the system message out, trims everything, prints a date that may be set.
HEADERS = Family(
    """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

# Roles must alternate; a system message becomes part of the user's.
INST = Family(
    """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant, not ' + message['content']) }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    ("<s>", "[INST]", "[/INST]", "</s>"),
)

# Takes thoughts out of the history, and may be told not to think.
THINKING = Family(
    """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    (*_CHATML_TOKENS, "<think>", "</think>"),
)

# Knows the role by its newer name, and names speakers.
NEWER = Family(
    "{% for m in messages %}<|im_start|>{{ 'boss' if m.role == 'developer' else m.role }}"
    "{{ '=' + m.name if m.name is defined }}\n{{ m.content }}<|im_end|>{% endfor %}",
    _CHATML_TOKENS,
)

FAMILIES = {
    "ChatML": CHATML,
    "headers": HEADERS,
    "INST": INST,
    "thinking": THINKING,
    "newer": NEWER,
}
