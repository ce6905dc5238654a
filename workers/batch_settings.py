"""What the batch worker reads from the environment; nothing else of it does.

Every field names its reader. A bad or missing value keeps the process from starting; it is named by
its variable and never shown (`control.starting`).
"""

import os
from pathlib import Path

from pydantic import Field

from workers.settings import BrokerUrl, StoreSettings


class BatchWorkerSettings(StoreSettings):
    """One batch worker. Files lie in `headrace_data_dir`/files, shared with the gateways."""

    celery_broker_url: BrokerUrl
    headrace_data_dir: Path
    headrace_batch_concurrency: int = Field(default=2, ge=1, le=64)
    """Batches that this worker carries at once (BatchWorker)."""
    headrace_batch_window: int = Field(default=8, ge=1, le=1024)
    """Requests of one batch that are queued or running at once (BatchJob)."""
    headrace_batch_turns: int = Field(default=2, ge=1, le=64)
    """Workers that may carry one batch at once (BatchJob)."""
    headrace_batch_max_queued: int = Field(default=1000, ge=1)
    """Requests of class batch that may wait for one model (Admission)."""
    headrace_batch_drain_s: float = Field(default=5.0, gt=0)
    """How long a SIGTERM leaves to release leases; less than a spot node's notice (Celery)."""

    @property
    def file_folder(self) -> Path:
        """The local file store."""
        return self.headrace_data_dir / "files"


def remap_sigterm() -> None:
    """Make SIGTERM a soft stop: Celery reads this once, when its worker is first imported.

    Its own meaning, a warm stop, waits for running tasks without any limit.
    """
    os.environ["REMAP_SIGTERM"] = "SIGQUIT"  # noqa: TID251 - this is a settings file
