"""Runs chat templates in a child process that can be killed.

A template may loop for ever or ask for a gigabyte, and no thread can be stopped. So one child
renders for everybody, one render at a time; each has a second, and a child that does not
answer is killed and replaced. A warm render costs a fraction of a millisecond.
"""

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from engine.interface.errors import InvalidRequest
from engine.text.chat_template import ChatToRender
from engine.text.child_process import ChildLost, ChildProcess

_MODULE = "engine.text.template_child"


class TemplateFailure(Exception):
    """The template could not be rendered, through no fault of the request's messages."""


class TemplateBusy(TemplateFailure):
    """Too many wait; the template may be fine."""


class TemplateRenderer:
    """Renders chat templates; may be called from any thread and any event loop.

    The child starts with the first render, or with `start`. At most `max_waiting` renders
    wait; one more is TemplateBusy. Call `close` at the end.
    """

    def __init__(
        self,
        *,
        time_limit_s: float = 1.0,
        memory_bytes: int = 512 * 1024 * 1024,
        max_chars: int = 16 * 1024 * 1024,
        max_waiting: int = 256,
    ) -> None:
        self._time_limit_s = time_limit_s
        # Should this process die first, the child must not outlive it for long.
        self._arguments = [str(memory_bytes), str(max_chars), str(2 * time_limit_s)]
        # JSON writes a character in at most twelve bytes.
        self._max_answer_bytes = 12 * max_chars + 1024
        self._places = threading.Semaphore(max_waiting)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        # Only the one thread touches the child; `close` does once that thread has ended.
        self._child: ChildProcess | None = None

    def start(self) -> None:
        """Start the child now and wait until it is ready, so that no request pays for it."""
        self._thread.submit(self._ready_child).result()

    async def render(self, template: str, chat: ChatToRender) -> str:
        """The prompt text.

        Raises InvalidRequest when the template does not accept these messages or knows no such
        option, TemplateFailure when it is broken, too slow or too greedy, and TemplateBusy.
        """
        return await asyncio.wrap_future(self._submit(template, chat))

    def render_blocking(self, template: str, chat: ChatToRender) -> str:
        """As `render`, for callers without an event loop."""
        return self._submit(template, chat).result()

    def close(self) -> None:
        """End the child. Renders that still wait are cancelled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._discard_child()

    def _submit(self, template: str, chat: ChatToRender) -> "Future[str]":
        if not self._places.acquire(blocking=False):
            raise TemplateBusy("Too many chat templates wait to be rendered.")
        try:
            future = self._thread.submit(self._render, template, chat)
        except RuntimeError as error:
            self._places.release()
            raise TemplateFailure("The template renderer is closed.") from error
        # A caller who leaves cancels the future: its place is free again either way.
        future.add_done_callback(lambda _: self._places.release())
        return future

    def _render(self, template: str, chat: ChatToRender) -> str:
        request = json.dumps(
            {
                "template": template,
                "messages": [dict(message) for message in chat.messages],
                "now": chat.now.isoformat(),
                "add_generation_prompt": chat.add_generation_prompt,
                "special_texts": dict(chat.special_texts),
                "options": dict(chat.options),
            }
        ).encode()
        child = self._ready_child()
        try:
            answer = child.exchange(request, self._time_limit_s, self._max_answer_bytes)
            return _text_of(json.loads(answer))
        except ChildLost as error:
            self._discard_child()
            # The next caller should not wait for Python to start.
            self._child = ChildProcess(_MODULE, self._arguments)
            raise TemplateFailure(f"The chat template was stopped: {error}") from error

    def _ready_child(self) -> ChildProcess:
        if self._child is None:
            self._child = ChildProcess(_MODULE, self._arguments)
        try:
            self._child.wait_until_ready()
        except ChildLost as error:
            self._discard_child()
            raise TemplateFailure(f"The template process did not start: {error}") from error
        return self._child

    def _discard_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _text_of(answer: Mapping[str, str]) -> str:
    if "text" in answer:
        return answer["text"]
    if "refused" in answer:
        message = f"The model's chat template refuses these messages: {answer['refused']}"
        raise InvalidRequest(message, param="messages")
    if "unknown" in answer:
        name, known = answer["unknown"], answer["known"]
        message = f"The model's chat template has no option {name}; it has: {known}."
        raise InvalidRequest(message, param="chat_template_kwargs", code="unsupported_parameter")
    raise TemplateFailure(f"The chat template failed: {answer.get('failed')}")
