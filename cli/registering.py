"""`headrace weights register`: puts a model in force without serving it from here.

For services whose processes are started one by one; `headrace serve` does the same by itself.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from cli.served_model import find_model
from cli.stores import failures_in_words
from control.database.connection import connect
from control.registry.model_version import ModelVersion
from control.registry.store import register_version


def register_model(
    database_url: str,
    wish: str | None,
    weight_store: Path,
    is_test_build: bool,
    progress: Callable[[str], None],
) -> ModelVersion:
    """Register the wished model (see `find_model`), in force from now on.

    Registering what is in force already changes nothing. Raises ModelNotServable, or Conflict
    if the version's name means other weights.
    """
    version = asyncio.run(find_model(wish, weight_store, is_test_build, progress))
    engine = connect(database_url, "register", pool_size=1)
    try:
        with failures_in_words(), engine.begin() as connection:
            register_version(connection, version)
    finally:
        engine.dispose()
    return version
