"""The end of a gateway's life: open answers may finish until the drain is over, then they are
told so and stopped.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    """Knows the tasks that answer requests. `is_over` once they must stop."""

    def __init__(self) -> None:
        self.is_over = False
        self._tasks: set[asyncio.Task[object]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The current task answers a request until the block ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cancel every answer; each sees `is_over` and says why it stops."""
        self.is_over = True
        for task in self._tasks:
            task.cancel()
