"""The gateway's settings: the only place of this process that reads the environment.

DATABASE_URL, REDIS_URL           where the stores are
CELERY_BROKER_URL                 where batch workers wait; without it maintenance rings
HEADRACE_KEY_PEPPER               at least 32 bytes in hexadecimal; there is no default
HEADRACE_<FIELD>                  every other field below
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from control.identity.keys import MIN_PEPPER_BYTES


class BadSettings(Exception):
    """The environment lacks something or holds something unusable; one line for each."""


def _check_pepper(value: SecretStr) -> SecretStr:
    try:
        pepper = bytes.fromhex(value.get_secret_value())
    except ValueError:
        raise ValueError("it must be hexadecimal") from None
    if len(pepper) < MIN_PEPPER_BYTES:
        raise ValueError(
            f"it has {len(pepper)} bytes; {MIN_PEPPER_BYTES} or more are needed "
            "(openssl rand -hex 32 makes some)"
        )
    return value


class GatewaySettings(BaseSettings):
    """Each field says who reads it."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", frozen=True, extra="ignore")

    # api.gateway
    database_url: SecretStr = Field(validation_alias="DATABASE_URL")
    redis_url: SecretStr = Field(validation_alias="REDIS_URL")
    key_pepper: Annotated[SecretStr, AfterValidator(_check_pepper)]
    database_pool_size: int = Field(8, ge=1, le=64)
    max_queued: int = Field(1024, ge=1)
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    heartbeat_s: float = Field(9.0, gt=0, le=10)
    data_dir: Path = Path(".headrace")
    celery_broker_url: SecretStr | None = Field(None, validation_alias="CELERY_BROKER_URL")

    # api.server
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    gateway_drain_s: float = Field(20.0, ge=0)
    keep_alive_s: int = Field(80, ge=75)
    trusted_proxies: str = ""

    @property
    def pepper(self) -> bytes:
        """The secret under which keys are hashed."""
        return bytes.fromhex(self.key_pepper.get_secret_value())


def read_settings() -> GatewaySettings:
    """Read the environment. Raises BadSettings, which names variables but never their values."""
    try:
        return GatewaySettings()
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_input=False, include_url=False):
            name = str(detail["loc"][0])
            variable = name if name.isupper() else "HEADRACE_" + name.upper()
            lines.append(f"{variable}: {detail['msg']}")
        raise BadSettings("\n".join(lines)) from None
