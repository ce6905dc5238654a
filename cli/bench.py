"""`headrace bench`: measurements. Each prints what it measured beside its bar; the exit status says
whether the bar was met.

Those on real weights take a model folder, or fetch the demo model as a first `serve` does.
"""

# ruff: noqa: PLC0415 - a command imports what it runs when it runs, so that `--help` is quick

from pathlib import Path
from typing import Annotated

import typer

from cli.data_dir import DEFAULT_DATA_DIR
from cli.errors import CommandFailed
from cli.settings import API_KEY, given

bench = typer.Typer(help="Measurements.", no_args_is_help=True)

ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", exists=True, file_okay=False, help="Without it: the demo model."),
]
ResultFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write the results here too.")
]
NumThreads = Annotated[int, typer.Option(min=0, help="0 leaves the choice to torch.")]


@bench.command()
def overhead() -> None:
    """What the service adds to the first token, over the same engine called in process."""
    from benchmarks.overhead import main

    main()


@bench.command()
def scheduler() -> None:
    """What a step of 512 sequences costs outside the device."""
    from benchmarks.scheduler import main

    main()


@bench.command()
def fairness() -> None:
    """What finding the next of 10,000 waiting requests costs."""
    from benchmarks.fairness import main

    main()


@bench.command()
def kv_admission() -> None:
    """What admission by learned output lengths saves, and what it costs, on a virtual clock."""
    from benchmarks.kv_admission import main

    main()


@bench.command()
def prefix_reuse() -> None:
    """What sharing beginnings saves, and that no block is lost."""
    from benchmarks.prefix_reuse import main

    main()


@bench.command()
def preemption(
    model: ModelFolder = None,
    requests: Annotated[int, typer.Option(min=2, help="Sequences.")] = 64,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of each in the end.")] = 2_000,
    fitting: Annotated[int, typer.Option(min=1, help="Whole sequences with room.")] = 12,
    num_threads: NumThreads = 0,
) -> None:
    """That losing one's place changes no word of a real model. Takes minutes to hours."""
    from benchmarks.preemption import Load, main

    _set_num_threads(num_threads)
    # Prompts are a tenth to a third of it, so that most of the growth comes unforeseen.
    load = Load(requests, tokens, (tokens // 10, tokens * 3 // 10), fitting)
    main(_folder(model), load)


@bench.command()
def interference(model: ModelFolder = None, num_threads: NumThreads = 0) -> None:
    """What a long prompt does to the pace of those who are reading."""
    from benchmarks.interference import main

    _set_num_threads(num_threads)
    main(_folder(model))


@bench.command()
def structured_output(
    model: ModelFolder = None,
    schemas: Annotated[int, typer.Option(min=1, help="Random JSON schemas.")] = 500,
    tokens: Annotated[int, typer.Option(min=1, help="At most, of each output.")] = 400,
    num_threads: NumThreads = 0,
) -> None:
    """That every output that ends is valid by its JSON schema. Takes minutes."""
    try:
        from benchmarks.structured_output import main
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"{error.name} is not installed: pip install -r requirements/dev.txt"
        ) from error

    _set_num_threads(num_threads)
    main(_folder(model), schemas, tokens)


@bench.command()
def parity(
    model: ModelFolder = None,
    ranks: Annotated[int, typer.Option(min=1, help="More than 1: against one rank.")] = 1,
    num_threads: NumThreads = 0,
) -> None:
    """That the engine says what transformers says, word for word. Takes minutes."""
    from benchmarks.parity import main

    _set_num_threads(num_threads)
    main(_folder(model), ranks)


@bench.command()
def lm_eval(
    harness: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="The lm_eval command of its own venv."),
    ],
    model: ModelFolder = None,
) -> None:
    """That lm-evaluation-harness gives the served model the marks that transformers earns."""
    from benchmarks.lm_eval_parity import main

    main(harness.absolute(), _folder(model).absolute())


@bench.command()
def engine_speed(
    model: ModelFolder = None,
    dtype: Annotated[str, typer.Option(help="As HEADRACE_DTYPE.")] = "bfloat16",
    num_threads: NumThreads = 0,
    json: ResultFile = None,
) -> None:
    """Decode and prefill rates of the engine alone. Takes a minute or two."""
    from benchmarks.engine_speed import main

    _set_num_threads(num_threads)
    main(_folder(model), dtype, json)


@bench.command()
def serving(
    base_url: Annotated[str, typer.Option(help="Such as http://127.0.0.1:8000.")],
    model_name: Annotated[str, typer.Option(help="As the server calls it.")],
    work: Annotated[list[str], typer.Option(help="served or prefix.")] = ["served", "prefix"],  # noqa: B006
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Open loop, requests per second.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    json: ResultFile = None,
) -> None:
    """What readers get from a server that runs, of any make. HEADRACE_API_KEY may hold a key."""
    from benchmarks.completion_client import Endpoint
    from benchmarks.serving import WORKS, at_rate, main

    unknown = [name for name in work if name not in WORKS]
    if unknown:
        raise CommandFailed(f"--work {unknown[0]} is none of {', '.join(WORKS)}.")
    endpoint = Endpoint(base_url, model_name, given(API_KEY) or "")
    try:
        main(endpoint, [at_rate(WORKS[name], rate) for name in work], runs, json)
    except (ValueError, RuntimeError) as error:
        raise CommandFailed(str(error)) from error


@bench.command()
def control_plane(json: ResultFile = None) -> None:
    """What 84,000 tokens per second cost on their way through Valkey. Takes a minute."""
    from benchmarks.control_plane import main

    main(json)


@bench.command()
def broken_streams(
    json: ResultFile = None,
    streams: Annotated[int, typer.Option(min=1, help="Read while gateways die.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Of 50 calls that race for one key.")] = 100,
    dropped: Annotated[int, typer.Option(min=1, help="Calls without a key.")] = 300,
) -> None:
    """What callers see of gateways that die, and what repeated calls cost. Takes minutes."""
    from benchmarks.broken_streams import Plan, main

    main(json, Plan(num_streams=streams, num_rounds=rounds, num_dropped=dropped))


@bench.command()
def settlement(json: ResultFile = None) -> None:
    """What it costs that a request is in the ledger before its end is told. Takes a minute."""
    from benchmarks.settlement import main

    main(json)


@bench.command()
def stages(json: ResultFile = None) -> None:
    """That a request's stages in the database are the time its reader waited. Takes a minute."""
    from benchmarks.stages import main

    main(json)


@bench.command()
def platform_cost(model: ModelFolder = None, json: ResultFile = None) -> None:
    """What the service takes of the engine's own speed. Takes a few minutes."""
    from benchmarks.platform_cost import main

    main(_folder(model), json)


@bench.command()
def perplexity(
    model: ModelFolder = None,
    dtype: Annotated[str, typer.Option(help="Compared with bfloat16.")] = "int8",
    num_threads: NumThreads = 0,
    json: ResultFile = None,
) -> None:
    """What a smaller dtype costs in quality, against bfloat16."""
    from benchmarks.perplexity import main

    _set_num_threads(num_threads)
    main(_folder(model), dtype, json)


@bench.command()
def compare(  # noqa: PLR0913, PLR0917 - options of a command line
    peers: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Filled as benchmarks/peers/README.md says."
        ),
    ] = None,
    model: ModelFolder = None,
    precision: Annotated[list[str], typer.Option(help="bf16 or int8.")] = ["bf16", "int8"],  # noqa: B006
    part: Annotated[list[str], typer.Option(help="offline or served.")] = ["offline", "served"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Medians are of so many.")] = 3,
    tiny: Annotated[
        bool, typer.Option(help="To see that all runs; no figure means a thing.")
    ] = False,
    json: ResultFile = None,
) -> None:
    """This engine beside others on this machine, turn by turn. Takes 10 to 20 minutes."""
    from dataclasses import replace

    from benchmarks.compare import PARTS, Plan, main
    from benchmarks.contestants import PRECISIONS

    for name in (*precision, *part):
        if name not in (*PRECISIONS, *PARTS):
            raise CommandFailed(f"{name} is none of {', '.join((*PRECISIONS, *PARTS))}.")
    plan = Plan.tiny(part) if tiny else replace(Plan(parts=part), num_rounds=rounds)
    main(_folder(model).absolute(), peers, precision, plan, json)


@bench.command()
def plots(
    results: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="What compare --json wrote.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the pictures go.")],
) -> None:
    """Draw a comparison's results as PNG."""
    from benchmarks.plots import MATPLOTLIB, NothingToDraw, main

    try:
        pictures = main(results, out)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"Drawing needs {MATPLOTLIB}: pip install {MATPLOTLIB}") from error
    except NothingToDraw as error:
        raise CommandFailed(str(error)) from error
    for picture in pictures:
        typer.echo(picture)


@bench.command()
def gpu(
    json: ResultFile = None,
    tiny: Annotated[
        bool, typer.Option(help="Try it out on a CPU; set TRITON_INTERPRET=1 before.")
    ] = False,
) -> None:
    """That every Triton kernel is right, and how near it and a whole model come to the roof."""
    from benchmarks.gpu import CannotMeasure, run

    try:
        run(json, tiny)
    except CannotMeasure as reason:
        raise CommandFailed(str(reason)) from reason


def _folder(model: Path | None) -> Path:
    from workers.demo_model import fetch_demo_model

    return model or fetch_demo_model(DEFAULT_DATA_DIR / "weights", typer.echo)


def _set_num_threads(num_threads: int) -> None:
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
