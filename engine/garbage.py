"""Keeps Python's garbage collector out of the way of a process that steps an engine.

A step makes hundreds of small objects and drops as many, without cycles; by its own counting
the collector would run more than once a step, and a full collection, which walks everything
that lives as long as the process, takes as long as dozens of steps.
"""

import gc

# Objects made and not dropped before the youngest are looked at, and how often older ones are.
THRESHOLDS = (50_000, 50, 1_000)


def settle() -> None:
    """Call it once when everything long-lived is there: it is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
