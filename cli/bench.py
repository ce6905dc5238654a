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

bench = typer.Typer(help="Measurements.", no_args_is_help=True)

ModelFolder = Annotated[
    Path | None,
    typer.Option("--model", exists=True, file_okay=False, help="Without it: the demo model."),
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


def _folder(model: Path | None) -> Path:
    from workers.demo_model import fetch_demo_model

    return model or fetch_demo_model(DEFAULT_DATA_DIR / "weights", typer.echo)


def _set_num_threads(num_threads: int) -> None:
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
