"""An engine whose model is split over several processes on this machine (tensor parallel).

    engine = ranked_engine(Path("models/smollm2"), EngineSettings(), 2)

It is used like any other; this process is the first rank, and the others end with it.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.model_runner import ModelRunner
from engine.execution.ranks.follower_process import FollowerProcess, RankLost
from engine.execution.ranks.gloo_group import GlooGroup
from engine.execution.ranks.join import Join
from engine.execution.ranks.ranked_execution import RankedExecution
from engine.grammar.grammar_compiler import GrammarCompiler
from engine.layers.shard import Shard
from engine.models.decoder import Decoder
from engine.models.description import read_description
from engine.models.loader import load_decoder, refuse_too_many_ranks


def ranked_engine(
    folder: Path,
    settings: EngineSettings,
    num_ranks: int,
    *,
    dtype: str = "bfloat16",
    clock: Callable[[], float] = time.time,
    on_loss: Callable[[RankLost], None] | None = None,
) -> Engine:
    """Load a model folder over `num_ranks` ranks, each with as many threads as torch has here.

    Raises UnsupportedModel by name, RankLost if a follower fails. `on_loss`: see
    RankedExecution. `clock` is the clock of `request.deadline_at`.
    """
    refuse_too_many_ranks(read_description(folder), num_ranks)
    followers: list[FollowerProcess] = []
    grammars = GrammarCompiler(folder)
    try:
        decoder = _load(folder, settings, dtype, num_ranks, followers)
        runner = ModelRunner(
            decoder,
            settings.num_blocks,
            settings.block_size,
            settings.num_host_blocks,
            grammars.new_rows(),
        )
        for follower in followers:
            follower.wait_until_ready()
    except BaseException:
        for follower in followers:
            follower.kill()
        grammars.close()
        raise
    execution = RankedExecution(runner, settings.block_size, followers, on_loss)
    return Engine(runner, settings, execution=execution, grammars=grammars, clock=clock)


def _load(
    folder: Path,
    settings: EngineSettings,
    dtype: str,
    num_ranks: int,
    followers: list[FollowerProcess],
) -> Decoder:
    """Start the followers, meet them, and load the first share while they load theirs."""
    # Private to this user, and needed only until all have met.
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as private:
        meeting_place = Path(private) / "meeting"
        for rank in range(1, num_ranks):
            join = Join(
                rank=rank,
                size=num_ranks,
                meeting_place=str(meeting_place),
                folder=str(folder.absolute()),
                dtype=dtype,
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                num_host_blocks=settings.num_host_blocks,
                num_threads=torch.get_num_threads(),
            )
            followers.append(FollowerProcess(join))
        for follower in followers:
            follower.wait_until_here()
        group = GlooGroup(meeting_place, 0, num_ranks)
    return load_decoder(folder, dtype, Shard(0, num_ranks, group))
