"""Names for the events of a stream, so that a reader who lost it can say where it broke.

    id: <completion id>:<n>

n is the output tokens, over all choices, that were delivered up to and including the event. It
never falls, and events that add no token repeat the last one. So of the events that bear the n
that a reader names, the first has surely arrived; all the others are told again.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EventLabels:
    """Labels the events of one telling. `after` is the n that the reader names, if any."""

    completion_id: str
    after: int | None = None
    _has_met_first: bool = field(default=False, init=False)

    def label(self, event: bytes, num_tokens: int) -> bytes:
        """The event under its name; nothing if the reader has it."""
        if not event:
            return b""
        if self.after is not None and num_tokens < self.after:
            return b""
        if num_tokens == self.after and not self._has_met_first:
            self._has_met_first = True
            return b""
        return b"id: %b:%d\n" % (self.completion_id.encode(), num_tokens) + event
