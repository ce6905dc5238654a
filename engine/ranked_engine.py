"""An engine whose model is split over several processes on this machine (tensor parallel).

    engine = ranked_engine(Path("models/smollm2"), EngineSettings(), 2)

It is used like any other; this process is the first rank, and the others end with it.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
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
        # Private to this user.
        with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as private:
            first = Join(
                rank=0,
                size=num_ranks,
                meeting_place=str(Path(private) / "meeting"),
                folder=str(folder.absolute()),
                dtype=dtype,
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                num_host_blocks=settings.num_host_blocks,
                num_threads=torch.get_num_threads(),
            )
            decoder = _load(first, followers)
        runner = ModelRunner(
            decoder,
            settings.num_blocks,
            settings.block_size,
            settings.num_host_blocks,
            grammars.new_rows(),
        )
    except BaseException:
        for follower in followers:
            follower.kill()
        grammars.close()
        raise
    execution = RankedExecution(runner, settings.block_size, followers, on_loss)
    return Engine(runner, settings, execution=execution, grammars=grammars, clock=clock)


def _load(first: Join, followers: list[FollowerProcess]) -> Decoder:
    """Start the followers, meet them, and load the first share while they load theirs."""
    for rank in range(1, first.size):
        followers.append(FollowerProcess(msgspec.structs.replace(first, rank=rank)))
    for follower in followers:
        follower.wait_until_here()
    group = GlooGroup(Path(first.meeting_place), first.rank, first.size)
    decoder = load_decoder(Path(first.folder), first.dtype, Shard(first.rank, first.size, group))
    for follower in followers:
        follower.wait_until_ready()
    return decoder
