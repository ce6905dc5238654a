"""What the workers read from the environment; nothing else here reads it.

Every field names its reader. A bad or missing value keeps the process from starting; it is named by
its variable and never shown (`control.starting`).
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from control.server_urls import check_broker_url, check_database_url, check_redis_url

DatabaseUrl = Annotated[str, AfterValidator(check_database_url)]
RedisUrl = Annotated[str, AfterValidator(check_redis_url)]
BrokerUrl = Annotated[str, AfterValidator(check_broker_url)]


class StoreSettings(BaseSettings):
    """Where PostgreSQL and Redis are. Read by every worker."""

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore")

    database_url: DatabaseUrl
    redis_url: RedisUrl
    headrace_test_build: bool = False
    headrace_fault: str = ""
    """Where the process dies (test builds; `headrace faults` lists the places)."""


class ReplicaSettings(StoreSettings):
    """One replica. `headrace_model` is a model in force, or one pinned as name@version."""

    headrace_model: str
    headrace_data_dir: Path
    """Where the step log is kept, which the ledger is checked against."""
    headrace_dtype: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    headrace_kv_tokens: int = Field(default=32_768, ge=64)
    headrace_host_kv_tokens: int = Field(default=16_384, ge=0)
    """KV of preempted and idle sequences that is kept in host memory; 0 keeps none."""
    headrace_block_size: int = Field(default=16, ge=1, le=256)
    headrace_max_num_seqs: int = Field(default=32, ge=1, le=1024)
    headrace_max_num_batched_tokens: int = Field(default=256, ge=1)
    headrace_chunk_size: int = Field(default=128, ge=1)
    headrace_inter_token_target_ms: float = Field(default=40.0, gt=0)
    """Steps are made smaller while they take longer than this."""
    headrace_tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Processes that the model's layers are split over."""
    headrace_num_threads: int = Field(default=0, ge=0)
    """Threads that compute in each of them; 0 leaves the choice to torch, or divides it."""
    headrace_drain_s: float = Field(default=5.0, ge=0)
    headrace_scripted_delay_ms: float = Field(default=0.0, ge=0)
    """How long a step of the scripted model takes (test builds)."""


class DispatcherSettings(StoreSettings):
    """The dispatcher needs only its stores."""


class MaintenanceSettings(StoreSettings):
    """Maintenance rings batch doorbells and tidies `headrace_data_dir`."""

    celery_broker_url: BrokerUrl
    headrace_data_dir: Path
    headrace_expire_after_s: float = Field(default=60.0, ge=1)
    """How long Redis must not have known a held request before it ends (Expiry)."""
