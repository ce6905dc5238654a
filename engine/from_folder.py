"""An engine for a model folder, for use as a library:

engine = engine_from_folder(Path("models/smollm2"))
engine.add(GenerationRequest(...))
while engine.has_work:
    for update in engine.step():
        print(update.choice, update.token_ids)
"""

import time
from collections.abc import Callable
from pathlib import Path

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import Execution, InlineExecution
from engine.execution.model_runner import ModelRunner
from engine.execution.runner import Runner
from engine.grammar.grammar_compiler import GrammarCompiler
from engine.models.loader import load_decoder


def engine_from_folder(
    folder: Path,
    settings: EngineSettings | None = None,
    *,
    dtype: str = "bfloat16",
    execution: Callable[[Runner], Execution] = InlineExecution,
    clock: Callable[[], float] = time.time,
) -> Engine:
    """Load config.json and safetensors from a folder; raises UnsupportedModel by name.

    `dtype` is "bfloat16" or "float32"; `execution` says where steps are computed, by default in
    the caller's thread; `clock` is the clock of `request.deadline_at`.
    """
    settings = settings or EngineSettings()
    grammars = GrammarCompiler(folder)
    runner = ModelRunner(
        load_decoder(folder, dtype),
        settings.num_blocks,
        settings.block_size,
        settings.num_host_blocks,
        grammars.new_rows(),
    )
    return Engine(runner, settings, execution=execution(runner), grammars=grammars, clock=clock)
