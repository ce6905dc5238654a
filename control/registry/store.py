"""The registry's rows. Versions never change; a rollout row says which one is in force."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from control.errors import Conflict
from control.registry.model_version import ModelVersion, Registry

_VERSIONS = text(
    """
    SELECT v.model, v.version, v.weights_digest, v.weights_folder, v.max_model_len,
           v.max_output_tokens, v.created_at, v.version = newest.version AS is_in_force
    FROM model_versions v
    LEFT JOIN LATERAL (
        SELECT version FROM rollouts r WHERE r.model = v.model ORDER BY revision DESC LIMIT 1
    ) newest ON true
    ORDER BY v.model, v.created_at
    """
)


def register_version(connection: Connection, version: ModelVersion) -> None:
    """Add a version; put it in force if it `is_in_force` and is not already.

    Registering the same version again is harmless. Raises Conflict when that name already means
    other weights or limits.
    """
    values = {
        "model": version.model,
        "version": version.version,
        "weights_digest": version.weights_digest,
        "weights_folder": version.weights_folder,
        "max_model_len": version.max_model_len,
        "max_output_tokens": version.max_output_tokens,
    }
    connection.execute(
        text("INSERT INTO models (model) VALUES (:model) ON CONFLICT DO NOTHING"), values
    )
    connection.execute(
        text(
            """
            INSERT INTO model_versions (model, version, weights_digest, weights_folder,
                                        max_model_len, max_output_tokens)
            VALUES (:model, :version, :weights_digest, :weights_folder,
                    :max_model_len, :max_output_tokens)
            ON CONFLICT DO NOTHING
            """
        ),
        values,
    )
    known = load_registry(connection).resolve(version.pinned_name)
    assert known is not None
    if known.weights_digest != version.weights_digest:
        raise Conflict(
            f"{version.pinned_name} is registered with weights {known.weights_digest[:12]}…; "
            f"weights {version.weights_digest[:12]}… need a new version name."
        )
    if version.is_in_force and not known.is_in_force:
        connection.execute(
            text("INSERT INTO rollouts (model, version) VALUES (:model, :version)"), values
        )


def load_registry(connection: Connection) -> Registry:
    """Everything that is registered."""
    return _registry(connection.execute(_VERSIONS).all())


async def load_registry_async(connection: AsyncConnection) -> Registry:
    """Everything that is registered, asynchronously."""
    return _registry((await connection.execute(_VERSIONS)).all())


def _registry(rows: Iterable[Row[Any]]) -> Registry:
    return Registry.of(ModelVersion(*tuple(row)) for row in rows)
