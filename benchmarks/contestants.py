"""Who takes part in a comparison, and the commands that start each.

Other engines live outside this program, in one folder that a person has filled as
`benchmarks/peers/README.md` says; those that are not there do not take part.

    openvino-venv/   openvino-bf16/   openvino-int8/      vllm-venv/   vllm-int8/
    llamacpp/        llama-server and llama-batched-bench, bf16.gguf, q8_0.gguf

They see of this program only the package `benchmarks`, through a folder with nothing else in
it: some of our packages have names that theirs could mistake for others.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import benchmarks
from benchmarks.offline_process import Command

PRECISIONS = ("bf16", "int8")
OURS = "ours"
_OUR_DTYPES = {"bf16": "bfloat16", "int8": "int8"}
_OPENVINO_KV = {"bf16": "bf16", "int8": "u8"}
_GGUF = {"bf16": "bf16.gguf", "int8": "q8_0.gguf"}

_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_OPENVINO_ENVIRONMENT = {"OPENVINO_TELEMETRY_OPTOUT": "1", "HF_HUB_OFFLINE": "1"}
_MALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One engine in one precision: how to run it offline, and, on a port, as a server.

    A `server` of None is this service, which `service_process` starts from `dtype`. One that does
    not stay loaded has a program for each work: it can neither be asked a question nor weighed.
    """

    name: str
    precision: str
    worker: Command
    server: Callable[[int], Command] | None = None
    stays_loaded: bool = True

    @property
    def dtype(self) -> str:
        """What our own settings call the precision."""
        return _OUR_DTYPES[self.precision]


def contestants(
    folder: Path, peers: Path | None, precision: str, package: Path
) -> list[Contestant]:
    """This engine on the model folder, then whoever is in the peers' folder.

    `package` is an empty folder, in which the others are shown the benchmarks.
    """
    ours = Contestant(
        OURS,
        precision,
        _python(sys.executable, "benchmarks.engine_worker", str(folder), _OUR_DTYPES[precision]),
    )
    if peers is None:
        return [ours]
    shown = package / "benchmarks"
    if not shown.exists():
        shown.symlink_to(benchmarks.__path__[0])
    seen = {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"}
    makers = (_openvino, _vllm, _llamacpp)
    found = [maker(folder, peers.absolute(), precision, seen) for maker in makers]
    return [ours, *(contestant for contestant in found if contestant is not None)]


def _openvino(folder: Path, peers: Path, precision: str, seen: dict[str, str]) -> Contestant | None:
    del folder
    python, model = peers / "openvino-venv/bin/python", peers / f"openvino-{precision}"
    if not (python.exists() and model.exists()):
        return None
    environment = seen | _OPENVINO_ENVIRONMENT
    shared = (str(model), _OPENVINO_KV[precision])

    def server(port: int) -> Command:
        name = "benchmarks.peers.openvino_server"
        return _python(python, name, *shared, str(port), environment=environment)

    worker = _python(python, "benchmarks.peers.openvino_worker", *shared, environment=environment)
    return Contestant("OpenVINO", precision, worker, server)


def _vllm(folder: Path, peers: Path, precision: str, seen: dict[str, str]) -> Contestant | None:
    python = peers / "vllm-venv/bin/python"
    model = folder.absolute() if precision == "bf16" else peers / "vllm-int8"
    if not (python.exists() and model.exists()):
        return None
    preloaded = [path for path in (_MALLOC, peers / "vllm-venv/lib/libiomp5.so") if path.exists()]
    environment = seen | _VLLM_ENVIRONMENT | {"LD_PRELOAD": ":".join(map(str, preloaded))}

    def server(port: int) -> Command:
        options = ["--model", str(model), "--served-model-name", "model", "--dtype", "bfloat16"]
        options += ["--max-model-len", "2048", "--max-num-seqs", "64", "--enable-prefix-caching"]
        options += ["--host", "127.0.0.1", "--port", str(port)]
        name = "vllm.entrypoints.openai.api_server"
        return _python(python, name, *options, environment=environment)

    worker = _python(python, "benchmarks.peers.vllm_worker", str(model), environment=environment)
    return Contestant("vLLM", precision, worker, server)


def _llamacpp(folder: Path, peers: Path, precision: str, seen: dict[str, str]) -> Contestant | None:
    del folder, seen
    programs, model = peers / "llamacpp", peers / "llamacpp" / _GGUF[precision]
    if not ((programs / "llama-server").exists() and model.exists()):
        return None

    def server(port: int) -> Command:
        options = ["-m", str(model), "--alias", "model", "--host", "127.0.0.1"]
        options += ["--port", str(port), "-t", "2", "-tb", "2", "-np", "16", "-c", "16384"]
        options += ["-fa", "auto", "--no-webui"]
        return Command([str(programs / "llama-server"), *options])

    worker = _python(
        sys.executable,
        "benchmarks.peers.llamacpp_worker",
        str(programs / "llama-batched-bench"),
        str(model),
    )
    return Contestant("llama.cpp", precision, worker, server, stays_loaded=False)


def _python(
    python: Path | str, module: str, *arguments: str, environment: dict[str, str] | None = None
) -> Command:
    return Command([str(python), "-m", module, *arguments], environment or {})
