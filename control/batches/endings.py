"""How a line ends that has no answer: the batch was over before it could run."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Unexecuted:
    """The code and the words that an error line carries in place of an answer."""

    code: str
    message: str

    def as_json(self) -> str:
        """The error as the item's row holds it and the error file shows it."""
        return msgspec.json.encode({"code": self.code, "message": self.message}).decode()


BATCH_CANCELLED = Unexecuted(
    "batch_cancelled", "The batch was cancelled before this request was executed."
)
BATCH_EXPIRED = Unexecuted(
    "batch_expired", "This request could not be executed before the completion window expired."
)
