"""A batch as its tenant sees it: OpenAI's object, every field always there.

    validating -> failed | in_progress
    in_progress -> finalizing -> completed | expired
    validating | in_progress -> cancelling -> cancelled

The last word of each arrow never changes again.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from control.identity.request_id import NUM_RANDOM_BITS, mint_request_id

WINDOWS_S = {"24h": 86_400, "12h": 43_200, "4h": 14_400, "1h": 3_600}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

_BATCH_ID = re.compile(r"batch_[0-9a-z]{26}")

JsonValue = Any  # what json.dumps takes; the wire is its only reader


class BatchStatus(StrEnum):
    """Where a batch is on its way."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BatchMoments:
    """When the batch came to each state; None for one it never came to."""

    created_at: datetime
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Items by how they ended, and the tokens they used."""

    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `model` is the pinned name that all its items run on, once validated."""

    batch_id: str
    tenant_id: str
    key_id: str
    status: BatchStatus
    endpoint: str
    completion_window: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    model: str | None
    metadata: dict[str, str]
    errors: JsonValue
    moments: BatchMoments
    progress: BatchProgress

    def as_object(self) -> dict[str, JsonValue]:
        """The batch as the API shows it."""
        moments, progress = self.moments, self.progress
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": self.errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": _seconds(moments.created_at),
            "in_progress_at": _seconds(moments.in_progress_at),
            "expires_at": _seconds(moments.expires_at),
            "finalizing_at": _seconds(moments.finalizing_at),
            "completed_at": _seconds(moments.completed_at),
            "failed_at": _seconds(moments.failed_at),
            "expired_at": _seconds(moments.expired_at),
            "cancelling_at": _seconds(moments.cancelling_at),
            "cancelled_at": _seconds(moments.cancelled_at),
            "request_counts": {
                "total": progress.total,
                "completed": progress.completed,
                "failed": progress.failed,
            },
            "usage": {
                "input_tokens": progress.input_tokens,
                "input_tokens_details": {"cached_tokens": progress.cached_tokens},
                "output_tokens": progress.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": progress.input_tokens + progress.output_tokens,
            },
            "metadata": self.metadata,
            # Nothing here predicts yet, and a guess would be worse than none.
            "x_expected_completion_at": None,
        }


def mint_batch_id(now_s: float, random_bits: int) -> str:
    """The id of a new batch, from 98 random bits."""
    assert 0 <= random_bits < 2**NUM_RANDOM_BITS
    return "batch_" + mint_request_id(now_s, random_bits)


def is_batch_id(text: str) -> bool:
    """True if the text could be an id of ours."""
    return _BATCH_ID.fullmatch(text) is not None


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
