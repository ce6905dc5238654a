"""Where the reading of one answer stands, over all the connections that it takes."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import openai

GRACE_S = "30"
MAX_TRIES = 10
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


class Reading:
    """One answer.

    Events that add no token bear the id of the one before. When a stream goes on after an id, the
    first event of that id is left out and the others come again: those are passed over here.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.name = ""
        self._response: Any = None
        self._headers = {"Idempotency-Key": str(uuid.uuid4()), "X-Resume-Grace": GRACE_S}
        self._event_id = ""
        self._last_id = ""
        self._num_of_last = 0
        self._num_known = 0
        self._num_tries = 0
        self._is_plain = False

    def asking(self, body: dict[str, Any]) -> dict[str, Any]:
        """The SDK's arguments for the call, or for its repetition."""
        after = {"Last-Event-ID": self._last_id} if self._last_id else {}
        return {
            **body,
            "extra_headers": {**body.get("extra_headers", {}), **self._headers, **after},
        }

    def begin(self, response: Any) -> None:
        """A connection is there."""
        self._response, self._event_id = response, ""
        self._num_known = max(self._num_of_last - 1, 0)

    def take(self, line: str) -> Iterator[dict[str, Any]]:
        """The chunk that the line completes, if it is a new one. Raises the stream's own error."""
        field, _, value = line.partition(": ")
        if field == "id":
            self._event_id = value
        elif field == "data" and value == "[DONE]":
            self.is_over = True
        elif field == "data":
            event_id, self._event_id = self._event_id, ""
            chunk = json.loads(value)
            if chunk.get("error"):
                error = chunk["error"]
                raise openai.APIError(error["message"], self._response.http_request, body=error)
            self.name, self._num_tries = chunk["id"], 0
            self._is_plain = self._is_plain or not (event_id or _is_empty(chunk))
            if self._is_plain or (event_id and self._is_new(event_id)):
                yield chunk

    def end(self) -> None:
        """The connection ended in order. Raises APIConnectionError if the stream did not."""
        if not self.is_over:
            message = "The stream ended without [DONE]: it was interrupted."
            raise openai.APIConnectionError(message=message, request=self._response.http_request)

    def pause_s(self, error: openai.APIError) -> float:
        """How long to wait before the call is repeated. Raises the error if that is no use."""
        self._num_tries += 1
        if self._is_plain or self._num_tries > MAX_TRIES or not _is_passing(error):
            raise error
        wait_ms = 0.0
        if isinstance(error, openai.APIStatusError):
            wait_ms = float(error.response.headers.get("retry-after-ms", 0))
        pause_s: float = min(FIRST_PAUSE_S * 2 ** (self._num_tries - 1), LONGEST_PAUSE_S)
        return max(pause_s, wait_ms / 1000)

    def _is_new(self, event_id: str) -> bool:
        if event_id != self._last_id:
            self._last_id, self._num_of_last, self._num_known = event_id, 1, 0
        elif self._num_known:
            self._num_known -= 1
            return False
        else:
            self._num_of_last += 1
        return True


def _is_empty(chunk: dict[str, Any]) -> bool:
    """True of what a gateway says of its own accord: heartbeats, and the usage before it goes."""
    says = [c.get("text") or c.get("delta", {}).get("content") for c in chunk.get("choices", ())]
    return not any(says)


def _is_passing(error: openai.APIError) -> bool:
    """Whether the same call may fare better in a moment."""
    if isinstance(error, openai.APIStatusError):
        is_final = error.response.headers.get("x-should-retry") == "false"
        if error.status_code == 409:
            return error.code == "request_in_progress"
        return not is_final and (error.status_code in (408, 429) or error.status_code >= 500)
    return isinstance(error, openai.APIConnectionError) or error.code == "server_restarting"
