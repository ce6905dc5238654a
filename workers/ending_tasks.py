"""Ends asyncio tasks for certain, or says that it could not.

A library on the way can swallow a cancellation: the asynchronous Redis client raises a connection
error in its place. Whoever catches that error goes on, perhaps to wait for ever. So a cancellation
that had no effect is repeated; and what swallows every one is left alone in the end, since nobody
else must wait for it.
"""

import asyncio
import logging
from collections.abc import Iterable

# A cancellation that had no effect for so long was lost, and is repeated.
CANCEL_AGAIN_S = 0.3
MAX_CANCELS = 5

log = logging.getLogger(__name__)


async def end_tasks(tasks: Iterable["asyncio.Task[object]"]) -> None:
    """Cancel the tasks, all at once, until they are over or have had MAX_CANCELS."""
    living = set(tasks)
    ended = {task for task in living if task.done()}
    living -= ended
    for _ in range(MAX_CANCELS):
        if not living:
            break
        for task in living:
            task.cancel()
        done, living = await asyncio.wait(living, timeout=CANCEL_AGAIN_S)
        ended |= done
    for task in living:
        log.error("%s does not end, and is left behind", task.get_name())
    for task in ended:
        # Whoever has a use for a result has taken it before.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s ended with %s", task.get_name(), type(error).__name__)
