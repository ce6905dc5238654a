"""Waiting for a store that is away: the same call again, later and later, until it works."""

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 2.0

Result = TypeVar("Result")
log = logging.getLogger(__name__)


def retry_until_done(
    call: Callable[[], Result], *away: type[Exception], patience_s: float = math.inf
) -> Result:
    """Carry out `call`, again and again while it raises one of `away`.

    After `patience_s` seconds it raises what the last try did. The call must be harmless to
    repeat when a reply was lost: settlements and steps are, being fenced by attempt and length.
    """
    delay_s = FIRST_RETRY_S
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except away as error:
            if time.monotonic() + delay_s > give_up:
                raise
            log.warning("retrying in %.2f s: %s", delay_s, type(error).__name__)
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)
