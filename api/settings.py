"""The gateway's settings: the only place of this process that reads the environment.

DATABASE_URL, REDIS_URL           where the stores are
CELERY_BROKER_URL                 where batch workers wait; without it maintenance rings
HEADRACE_KEY_PEPPER               at least 32 bytes in hexadecimal; there is no default
HEADRACE_<FIELD>                  every other field below
"""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from control import starting
from control.identity.keys import MIN_PEPPER_BYTES
from control.server_urls import check_broker_url, check_database_url, check_redis_url


def _checked(check: Callable[[str], str]) -> AfterValidator:
    """A check of what a secret holds."""

    def validate(value: SecretStr) -> SecretStr:
        check(value.get_secret_value())
        return value

    return AfterValidator(validate)


def _check_pepper(value: str) -> str:
    try:
        pepper = bytes.fromhex(value)
    except ValueError:
        raise ValueError("it must be hexadecimal") from None
    if len(pepper) < MIN_PEPPER_BYTES:
        raise ValueError(
            f"it has {len(pepper)} bytes; {MIN_PEPPER_BYTES} or more are needed "
            "(openssl rand -hex 32 makes some)"
        )
    return value


def _check_proxies(value: str) -> str:
    """Whoever is trusted decides whom failed keys are counted against: never everybody."""
    for each in filter(None, (part.strip() for part in value.split(","))):
        try:
            network = ipaddress.ip_network(each)
        except ValueError:
            raise ValueError(f"{each!r} is no address or network such as 10.0.0.0/8") from None
        if not network.prefixlen:
            raise ValueError("it must not trust every address")
    return value


class GatewaySettings(BaseSettings):
    """Each field says who reads it."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", env_ignore_empty=True, frozen=True, extra="ignore"
    )

    # api.gateway
    database_url: Annotated[SecretStr, _checked(check_database_url)] = Field(
        validation_alias="DATABASE_URL"
    )
    redis_url: Annotated[SecretStr, _checked(check_redis_url)] = Field(validation_alias="REDIS_URL")
    key_pepper: Annotated[SecretStr, _checked(_check_pepper)]
    database_pool_size: int = Field(8, ge=1, le=64)
    max_queued: int = Field(1024, ge=1)
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    heartbeat_s: float = Field(9.0, gt=0, le=10)
    data_dir: Path = Path(".headrace")
    celery_broker_url: Annotated[SecretStr, _checked(check_broker_url)] | None = Field(
        None, validation_alias="CELERY_BROKER_URL"
    )

    # api.server
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    gateway_drain_s: float = Field(20.0, ge=0)
    keep_alive_s: int = Field(80, ge=75)
    trusted_proxies: Annotated[str, AfterValidator(_check_proxies)] = ""

    # api.main
    test_build: bool = False
    fault: str = ""

    @property
    def pepper(self) -> bytes:
        """The secret under which keys are hashed."""
        return bytes.fromhex(self.key_pepper.get_secret_value())


def read_settings() -> GatewaySettings:
    """Read the environment. Raises `control.starting.BadSettings`."""
    return starting.read_settings(GatewaySettings)
