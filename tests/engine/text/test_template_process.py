"""A template can harm nobody but its own render."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.interface.errors import InvalidRequest
from engine.text.chat_template import ChatToRender
from engine.text.template_process import TemplateFailure, TemplateRenderer
from tests.engine.text.conftest import NOW

CHAT = ChatToRender(messages=[{"role": "user", "content": "Hi"}], now=NOW)
GOOD = "{{ messages[0].content }}!"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHILD = [sys.executable, "-m", "engine.text.template_child"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        ENDLESS,
        "{{ 'a' * 10**9 }}",
        "{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '{:>999999999}'.format('x') }}",
        "{{ 'x' | center(999999999) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ [1] * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_fails_in_about_a_second_and_the_next_render_works(
    source: str, renderer: TemplateRenderer
) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateFailure):
        renderer.render_blocking(source, CHAT)
    assert time.monotonic() - started < 2.5
    assert renderer.render_blocking(GOOD, CHAT) == "Hi!"


def test_a_refusal_by_the_template_is_the_callers_mistake(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        renderer.render_blocking("{{ raise_exception('roles must alternate') }}", CHAT)
    assert caught.value.param == "messages"


def test_a_large_conversation_passes_both_pipes(renderer: TemplateRenderer) -> None:
    content = "\u4f60 " * 500_000
    chat = ChatToRender(messages=[{"role": "user", "content": content}], now=NOW)
    assert renderer.render_blocking(GOOD, chat) == content + "!"


def test_a_warm_render_takes_well_under_a_millisecond(renderer: TemplateRenderer) -> None:
    def one() -> float:
        started = time.perf_counter()
        renderer.render_blocking(GOOD, CHAT)
        return time.perf_counter() - started

    assert sorted(one() for _ in range(200))[50] < 0.001


async def test_many_tasks_and_threads_may_render_at_once(renderer: TemplateRenderer) -> None:
    chats = [
        ChatToRender(messages=[{"role": "user", "content": str(i)}], now=NOW) for i in range(40)
    ]
    texts = await asyncio.gather(*(renderer.render(GOOD, chat) for chat in chats))
    assert texts == [f"{i}!" for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        blocking = threads.map(lambda chat: renderer.render_blocking(GOOD, chat), chats)
        assert list(blocking) == texts


def test_the_queue_is_bounded_and_a_full_one_refuses() -> None:
    renderer = TemplateRenderer(max_waiting=2)
    renderer.start()
    try:
        with ThreadPoolExecutor(8) as threads:
            waiting = [threads.submit(renderer.render_blocking, ENDLESS, CHAT) for _ in range(8)]
            reasons = [str(future.exception()) for future in waiting]
        assert sum("Too many" in reason for reason in reasons) == 6
        assert sum("took too long" in reason for reason in reasons) == 2
        assert renderer.render_blocking(GOOD, CHAT) == "Hi!"
    finally:
        renderer.close()


async def test_a_caller_who_leaves_gives_the_place_back() -> None:
    renderer = TemplateRenderer(max_waiting=1)
    renderer.start()
    try:
        leaver = asyncio.create_task(renderer.render(ENDLESS, CHAT))
        await asyncio.sleep(0)
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert await _retried(renderer) == "Hi!"
    finally:
        renderer.close()


async def _retried(renderer: TemplateRenderer) -> str:
    """Render as soon as the running render, which cannot be cancelled, has been stopped."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return await renderer.render(GOOD, CHAT)
        except TemplateFailure:
            assert time.monotonic() < deadline


def test_a_closed_renderer_refuses() -> None:
    renderer = TemplateRenderer()
    renderer.close()
    with pytest.raises(TemplateFailure, match="closed"):
        renderer.render_blocking(GOOD, CHAT)


def test_the_child_ends_when_its_input_closes() -> None:
    with subprocess.Popen(
        [*CHILD, str(2**29), "1000", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.read(4) == bytes(4)
        child.stdin.close()
        assert child.wait(timeout=10) == 0


def test_an_endless_render_does_not_outlive_a_killed_parent() -> None:
    program = f"""
import os
from datetime import datetime
from engine.text.chat_template import ChatToRender
from engine.text.template_process import TemplateRenderer
renderer = TemplateRenderer(time_limit_s=0.5)
renderer.start()
print(renderer._child._process.pid, flush=True)
renderer._time_limit_s = 3600
chat = ChatToRender(messages=[], now=datetime(2026, 1, 1))
renderer.render_blocking({ENDLESS!r}, chat)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
        ended, _, _ = select.select([child], [], [], 10)
        os.close(child)
    assert ended
