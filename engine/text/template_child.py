"""The process in which chat templates run: `python -m engine.text.template_child`.

It reads a render from stdin, answers on stdout, and knows nothing else. Memory is bounded by
the kernel, time by the parent, who kills it. It ends when stdin closes; should the parent die
during an endless render, an alarm that nobody handles ends it.

A frame is a big-endian length of four bytes and that many bytes of JSON.

    request  {"template", "messages", "now", "add_generation_prompt", "special_texts", "options"}
    answer   {"text"} or {"refused": why} or {"failed": why} or {"unknown": option, "known": which};
             an empty frame first: ready
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import BinaryIO

import jinja2

from engine.text.chat_template import (
    ChatToRender,
    TemplateRefusal,
    compile_template,
    options_of,
    render_chat,
)
from engine.text.child_process import LENGTH_BYTES

_MAX_REASON_CHARS = 500
_MAX_TEMPLATES = 16

_compiled = lru_cache(maxsize=_MAX_TEMPLATES)(compile_template)
_options = lru_cache(maxsize=_MAX_TEMPLATES)(options_of)


def main(arguments: list[str]) -> None:
    """Answer renders until stdin closes. Arguments: memory in bytes, output chars, alarm in s."""
    memory_bytes, max_chars = int(arguments[0]), int(arguments[1])
    alarm_s = float(arguments[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(sys.stdout.buffer, b"")
    while (request := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        answer = json.dumps(_answer(request, max_chars)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sys.stdout.buffer, answer)


def _answer(request: bytes, max_chars: int) -> dict[str, str]:
    try:
        fields = json.loads(request)
        chat = ChatToRender(
            messages=fields["messages"],
            now=datetime.fromisoformat(fields["now"]),
            add_generation_prompt=fields["add_generation_prompt"],
            special_texts=fields["special_texts"],
            options=fields["options"],
        )
        known = _options(fields["template"]) if chat.options else frozenset()
        for name in chat.options:
            if name not in known:
                listed = ", ".join(sorted(known)) or "none"
                return {"unknown": name, "known": listed[:_MAX_REASON_CHARS]}
        return {"text": render_chat(_compiled(fields["template"]), chat, max_chars)}
    except TemplateRefusal as refusal:
        return {"refused": str(refusal)[:_MAX_REASON_CHARS]}
    except jinja2.TemplateSyntaxError as error:
        return {"failed": f"line {error.lineno}: {error.message}"[:_MAX_REASON_CHARS]}
    except Exception as error:  # noqa: BLE001 - whatever a template does is an answer
        return {"failed": f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]}


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    num_bytes = int.from_bytes(header, "big")
    body = stream.read(num_bytes)
    return body if len(body) == num_bytes else None


def _write(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
