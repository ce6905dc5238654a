"""The engine of a replica: the registered weights, in the sizes of its settings, ready to serve."""

import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from control.registry.manifest import verify_manifest
from control.registry.model_version import ModelVersion
from control.streams.clock import SharedClock
from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.execution import ThreadedExecution
from engine.execution.ranks.follower_process import RankLost
from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.from_folder import engine_from_folder
from engine.grammar.grammar_compiler import GrammarBusy
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.grammar import Grammar
from engine.interface.sampling_params import SamplingParams
from engine.models.config_file import UnsupportedModel
from engine.ranked_engine import ranked_engine
from engine.text.tokenizer import Tokenizer
from workers.scripted_model import is_scripted
from workers.settings import ReplicaSettings

RANK_LOST_STATUS = 70

log = logging.getLogger(__name__)


def load_engine(
    version: ModelVersion, settings: ReplicaSettings, clock: SharedClock
) -> tuple[Engine, Tokenizer]:
    """The engine for a registered version, from weights that are exactly the registered ones.

    Raises ManifestError for damaged weights and SystemExit for weights or a pool that do not fit
    what is registered.
    """
    folder = Path(version.weights_folder)
    weights_digest = verify_manifest(folder)
    if weights_digest != version.weights_digest:
        raise SystemExit(
            f"{version.pinned_name} is registered with weights {version.weights_digest}, "
            f"but {folder} holds {weights_digest}."
        )
    block_size = settings.headrace_block_size
    engine_settings = EngineSettings(
        block_size=block_size,
        num_blocks=settings.headrace_kv_tokens // block_size,
        max_num_batched_tokens=settings.headrace_max_num_batched_tokens,
        chunk_size=settings.headrace_chunk_size,
        max_num_seqs=settings.headrace_max_num_seqs,
        num_host_blocks=settings.headrace_host_kv_tokens // block_size,
        inter_token_target_s=settings.headrace_inter_token_target_ms / 1000,
    )
    num_slots = engine_settings.num_blocks * block_size
    if num_slots < version.max_model_len:
        raise SystemExit(
            f"HEADRACE_KV_TOKENS gives {num_slots} tokens of KV, but {version.pinned_name} is "
            f"registered with a context of {version.max_model_len}: one request could never "
            "finish. Give it more, or register a shorter context."
        )
    tokenizer = Tokenizer.from_folder(folder)
    if not is_scripted(folder):
        return _model_engine(folder, engine_settings, settings, clock), tokenizer
    if not settings.headrace_test_build:
        raise SystemExit("The scripted model runs only with HEADRACE_TEST_BUILD=1.")
    if settings.headrace_tensor_parallel > 1:
        raise SystemExit("The scripted model has no layers: HEADRACE_TENSOR_PARALLEL must be 1.")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limits = ModelLimits(
        config["vocab_size"], version.max_model_len, frozenset({config["eos_token_id"]})
    )
    runner = ScriptedRunner(
        limits,
        engine_settings.num_blocks,
        block_size,
        engine_settings.num_host_blocks,
        delay_ms=settings.headrace_scripted_delay_ms,
    )
    execution = ThreadedExecution(runner)
    return Engine(runner, engine_settings, execution=execution, clock=clock.now), tokenizer


def _model_engine(
    folder: Path, sizes: EngineSettings, settings: ReplicaSettings, clock: SharedClock
) -> Engine:
    """A real model's engine, in this process or over several."""
    dtype, num_ranks = settings.headrace_dtype, settings.headrace_tensor_parallel
    try:
        if num_ranks == 1:
            return engine_from_folder(
                folder, sizes, dtype=dtype, execution=ThreadedExecution, clock=clock.now
            )
        if not settings.headrace_num_threads:
            torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
        return ranked_engine(
            folder, sizes, num_ranks, dtype=dtype, clock=clock.now, on_loss=_end_at_once
        )
    except (UnsupportedModel, RankLost) as error:
        raise SystemExit(f"The model cannot be served: {error}") from error


def _end_at_once(loss: RankLost) -> None:
    """End a replica that has lost a rank: its requests go on elsewhere, from their logs."""
    log.critical("the replica ends: %s", loss)
    logging.shutdown()
    # The other threads may wait for the lost rank, in torch's own code, and would be waited for.
    os._exit(RANK_LOST_STATUS)


def warm_up(engine: Engine) -> None:
    """Run one short request, so that the first caller does not pay for the first step.

    Nor does the first grammar keep the inbox waiting for the processes that follow grammars. A
    model that follows none is served without.
    """
    request = GenerationRequest(
        request_id="0" * 26,
        prompts=((0, 1, 2),),
        sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        priority_class=PriorityClass.INTERACTIVE,
        cache_scope="warm-up",
        arrival=0.0,
        deadline_at=float("inf"),
    )
    engine.add(request)
    while engine.has_work:
        engine.step()
    sampling = replace(request.sampling, grammar=Grammar.any_json_object())
    with suppress(InvalidRequest, GrammarBusy):
        engine.prepare(replace(request, sampling=sampling))
