"""`headrace status`: what each replica last said of itself."""

import redis

from cli.stores import failures_in_words
from cli.table import print_table
from control.database.connection import connect
from control.registry.store import load_registry
from control.routing.replica_snapshot import ReplicaSnapshot
from control.routing.snapshot_store import read_snapshots
from control.streams.keys import ModelKeys

_COLUMNS = (
    "replica",
    "version",
    "accepting",
    "running",
    "waiting",
    "KV blocks free",
    "tokens",
    "from cache",
    "preempted",
    "ms per token",
)


def show_status(database_url: str, redis_url: str) -> None:
    """Print one row for each replica of each registered model; the silent ones last.

    A replica's name begins with its model, so only the version is told beside it. Raises
    StoreUnusable.
    """
    with failures_in_words():
        print_table(_COLUMNS, _rows(database_url, redis_url))


def _rows(database_url: str, redis_url: str) -> list[tuple[str, ...]]:
    engine = connect(database_url, "status", pool_size=1)
    try:
        with engine.connect() as connection:
            models = load_registry(connection).models
    finally:
        engine.dispose()
    rows: list[tuple[str, ...]] = []
    with redis.Redis.from_url(redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
        for model in models:
            living, silent = read_snapshots(client, ModelKeys(model))
            rows += [row_of(snapshot) for snapshot in living.values()]
            nothing = ("",) * (len(_COLUMNS) - 3)
            rows += [(each, "", "silent", *nothing) for each in sorted(silent)]
    return rows


def row_of(snapshot: ReplicaSnapshot) -> tuple[str, ...]:
    """What there is to tell of a living replica, column by column."""
    accepting = "yes" if snapshot.is_accepting else "no"
    return (
        snapshot.replica_id,
        snapshot.version,
        "stalled" if snapshot.is_stalled else accepting,
        f"{snapshot.num_running} of {snapshot.num_sequences_max}",
        str(snapshot.num_waiting),
        f"{snapshot.kv_blocks_free} of {snapshot.kv_blocks_total}",
        str(snapshot.tokens_total),
        str(snapshot.cached_tokens_total),
        str(snapshot.preemptions_total),
        _pace(snapshot),
    )


def _pace(snapshot: ReplicaSnapshot) -> str:
    """The measured time between two tokens, and the one that is aimed at."""
    if not snapshot.inter_token_ms:
        return ""
    measured, target = round(snapshot.inter_token_ms), round(snapshot.inter_token_target_ms)
    return f"{measured} (aim {target})"
