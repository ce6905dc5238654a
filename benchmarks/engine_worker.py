"""This engine as an offline worker: python -m benchmarks.engine_worker FOLDER DTYPE."""

import sys
from pathlib import Path

from benchmarks.engine_speed import SETTINGS, generate_with
from benchmarks.offline_work import Generate
from benchmarks.offline_worker import serve_works
from engine.execution.execution import ThreadedExecution
from engine.from_folder import engine_from_folder


def main(folder: Path, dtype: str) -> None:
    """Serve until stdin ends."""

    def load() -> Generate:
        engine = engine_from_folder(folder, SETTINGS, dtype=dtype, execution=ThreadedExecution)
        return generate_with(engine)

    serve_works(load)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
