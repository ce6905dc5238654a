"""Whether somebody wants the running task to stop, for loops that outlive Redis's failures.

The asynchronous client can raise a connection error in place of a cancellation that reached it
inside a call. A loop that catches the error must ask here, or it would go on for ever.
"""

import asyncio


def is_cancelled() -> bool:
    """True if the current task was cancelled, even if the cancellation has got lost since."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
