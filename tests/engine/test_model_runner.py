"""A real, tiny model behind the engine: chance, company and broken rows."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.oracle import small_engine, write_tiny_llama
from tests.engine.orders import Transcript, greedy, order, run_to_end

POISON = 259


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model one of whose tokens has a NaN embedding."""
    folder: Path = tmp_path_factory.mktemp("poisoned")
    write_tiny_llama(folder, tied=False)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, path)
    return folder


def test_sampled_requests_say_the_same_alone_and_in_company(folder: Path) -> None:
    chooser = random.Random(1)
    orders = [
        order(
            str(i),
            tuple(chooser.randrange(3, 250) for _ in range(chooser.randrange(1, 60))),
            SamplingParams(
                max_tokens=12,
                temperature=chooser.choice([0.7, 1.0, 1.5]),
                top_p=chooser.choice([1.0, 0.9]),
                top_k=chooser.choice([0, 20]),
                seed=i,
                n=1 + i % 2,
                ignore_eos=True,
            ),
        )
        for i in range(8)
    ]
    alone: dict[tuple[str, int], list[int]] = {}
    for one in orders:
        engine = small_engine(folder)
        engine.add(one)
        alone |= run_to_end(engine).token_ids
    engine = small_engine(folder)
    transcript = Transcript()
    for one in orders:
        engine.add(one)
        for _ in range(chooser.randrange(3)):
            transcript.note(engine.step())
    assert run_to_end(engine, transcript).token_ids == alone
    assert alone["1", 0] != alone["1", 1]


def test_a_resumed_sampled_request_goes_on_with_the_same_words(folder: Path) -> None:
    prompt, sampling = (5, 6, 7, 8), SamplingParams(max_tokens=16, seed=3, ignore_eos=True)
    engine = small_engine(folder)
    engine.add(order("whole", prompt, sampling))
    whole = run_to_end(engine).token_ids["whole", 0]
    engine.add(order("rest", prompt, sampling, resumed=(tuple(whole[:7]),)))
    assert run_to_end(engine).token_ids["rest", 0] == whole[7:]


def test_min_tokens_keeps_a_model_talking(folder: Path) -> None:
    prompt = (5, 6, 7)
    engine = small_engine(folder)
    engine.add(order("free", prompt, greedy(10)))
    first = run_to_end(engine).token_ids["free", 0][0]
    engine.add(
        order(
            "bound",
            prompt,
            SamplingParams(max_tokens=10, temperature=0.0, min_tokens=5, stop_token_ids=(first,)),
        )
    )
    tokens = run_to_end(engine).token_ids["bound", 0]
    assert len(tokens) >= 5
    assert first not in tokens[:5]


@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_sequence_that_turns_nan_fails_alone(poisoned: Path, place: int) -> None:
    prompt = tuple(range(10, 30))
    engine = small_engine(poisoned)
    engine.add(order("healthy", prompt, greedy(20)))
    undisturbed = run_to_end(engine).token_ids["healthy", 0]
    bad = [9] * 40
    bad[place] = POISON
    engine.add(order("healthy", prompt, greedy(20)))
    engine.add(order("bad", tuple(bad), greedy(20)))
    transcript = run_to_end(engine)
    assert transcript.ends["bad", 0] is SequenceEnd.ERROR
    assert transcript.token_ids["bad", 0] == []
    assert transcript.token_ids["healthy", 0] == undisturbed


def test_blocks_that_held_a_nan_do_not_harm_their_next_owner(poisoned: Path) -> None:
    prompt = tuple(range(10, 30))
    engine = small_engine(poisoned)
    engine.add(order("first", prompt, greedy(20)))
    expected = run_to_end(engine).token_ids["first", 0]
    # More broken sequences than the cache has blocks: every block has held NaNs only.
    for i in range(300):
        engine.add(order(f"bad-{i}", (POISON,) * 16, greedy(1)))
    run_to_end(engine)
    engine.add(order("next", prompt, greedy(20)))
    assert run_to_end(engine).token_ids["next", 0] == expected


def test_bfloat16_runs_and_mostly_agrees_with_float32(folder: Path) -> None:
    from engine.engine import EngineSettings
    from engine.from_folder import engine_from_folder

    words = []
    for dtype in ("float32", "bfloat16"):
        engine = engine_from_folder(folder, EngineSettings(num_blocks=64), dtype=dtype)
        for i in range(20):
            engine.add(order(str(i), (20 + i, 30, 40 + i), greedy(1)))
        words.append(list(run_to_end(engine).token_ids.values()))
    agreeing = sum(a == b for a, b in zip(*words, strict=True))
    assert agreeing >= 16


def test_the_model_length_comes_from_its_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    limits = small_engine(folder).limits
    assert limits.max_model_len == config["max_position_embeddings"]
    assert limits.eos_token_ids == {2}
    assert torch.get_default_dtype() is torch.float32
