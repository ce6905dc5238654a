"""Says on the terminal what is going on: one line per thing, with the seconds since the start.

On a terminal the present step is shown with a spinner; elsewhere lines only, so that a log
stays readable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """Writes to one console; `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._began_at = clock()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step that takes time; says when it is done."""
        began_at = self._clock()
        with self._console.status(name):
            yield
        self.say(f"{name}: ready in {self._clock() - began_at:.1f} s.")

    def say(self, text: str) -> None:
        """One line."""
        elapsed_s = self._clock() - self._began_at
        self._write(f"{elapsed_s:6.1f} s  {text}")

    def show(self, block: str) -> None:
        """A text to be copied from: not one character more or less."""
        self._write(block)

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
