"""OpenVINO GenAI as an offline worker: python -m benchmarks.peers.openvino_worker FOLDER KV."""

import sys

from benchmarks.offline_work import Generate
from benchmarks.offline_worker import serve_works
from benchmarks.peers.openvino_engine import OpenVinoEngine


def main(folder: str, kv: str) -> None:
    """Serve until stdin ends."""

    def load() -> Generate:
        return OpenVinoEngine(folder, kv, has_prefix_cache=False).generate

    serve_works(load)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
