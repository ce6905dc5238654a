"""`headrace weights register`: puts a model in force without serving it from here.

For services whose processes are started one by one; `headrace serve` does the same by itself.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection

from cli.administering import person
from cli.served_model import find_model
from cli.stores import failures_in_words
from control.database.connection import connect
from control.identity.audit import Change, record
from control.registry.model_version import ModelVersion
from control.registry.store import load_registry, register_version


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
            put_in_force(connection, version)
    finally:
        engine.dispose()
    return version


def put_in_force(connection: Connection, version: ModelVersion) -> None:
    """Register the version and, if that changed anything, write down who did it.

    Raises Conflict if the version's name means other weights.
    """
    before = load_registry(connection)
    register_version(connection, version)
    if load_registry(connection) == before:
        return
    replaced = before.resolve(version.model)
    change = Change(
        "model.register",
        version.pinned_name,
        None,
        None if replaced is None else _shown(replaced),
        _shown(version),
    )
    record(connection, person(), change)


def _shown(version: ModelVersion) -> dict[str, object]:
    return {
        "model": version.model,
        "version": version.version,
        "weights_digest": version.weights_digest,
    }
