"""A real, tiny model behind the engine: chance, company and broken rows."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.execution.model_runner import ModelRunner
from engine.execution.model_runner_output import NO_TOKEN
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.models.loader import load_decoder
from tests.engine.oracle import small_engine, write_tiny_llama
from tests.engine.orders import Transcript, greedy, order, run_to_end
from tests.engine.steps import Row, copy, spec, step

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_a_decoding_row_that_turns_nan_fails_alone_whatever_blocks_it_owns(
    poisoned: Path,
) -> None:
    runner = ModelRunner(load_decoder(poisoned, "float32"), 64, 4)
    prompts = {"short": (5, 6, 7), "long": tuple(range(10, 30)), "bad": (8, 9)}
    tables = {"short": (7,), "long": (2, 3, 4, 5, 6, 8), "bad": (0,)}
    rows = [Row(spec(k, len(p)), p, 0, tables[k]) for k, p in prompts.items()]
    runner.execute(step(*rows))
    rows = [Row(spec(k, len(p)), (11,), len(p), tables[k]) for k, p in prompts.items()]
    healthy = runner.execute(step(*rows)).token_ids
    # The row with the NaN owns block 0, where the padding of others would point by habit.
    rows[2].token_ids = (POISON,)
    output = runner.execute(step(*rows))
    assert list(output.errors) == [2]
    assert output.token_ids.tolist() == [*healthy[:2].tolist(), NO_TOKEN]


def test_a_row_that_failed_is_harmless_when_it_is_computed_once_more(poisoned: Path) -> None:
    runner = ModelRunner(load_decoder(poisoned, "float32"), 8, 4)
    bad, good = spec("bad"), spec("good", 5)
    prompt = (5, 6, 7, 8, 9)
    alone = runner.execute(step(Row(good, prompt, 0, (6, 7)))).token_ids.tolist()
    output = runner.execute(step(Row(bad, (5, POISON, 6), 0, (0, 1))))
    assert list(output.errors) == [0]
    # The next step was decided before anybody knew: it goes on, is copied, and fails again.
    output = runner.execute(
        step(
            Row(bad, (7, POISON), 3, (0, 1)),
            Row(good, prompt, 0, (3, 4)),
            moves=[copy(0, 2)],
        )
    )
    assert list(output.errors) == [0]
    assert output.token_ids.tolist() == [NO_TOKEN, *alone]
    for table in [(0, 1), (2, 5)]:
        assert runner.execute(step(Row(good, prompt, 0, table))).token_ids.tolist() == alone


def test_a_failed_chunk_that_wanted_no_token_is_an_error_too(poisoned: Path) -> None:
    runner = ModelRunner(load_decoder(poisoned, "float32"), 8, 4)
    output = runner.execute(
        step(
            Row(spec("bad", 9), (5, POISON, 6), 0, (0, 1), is_sampled=False),
            Row(spec("good", 9), (5, 6, 7), 0, (2, 3), is_sampled=False),
        )
    )
    assert list(output.errors) == [0]
    assert output.token_ids.tolist() == [NO_TOKEN, NO_TOKEN]


def test_time_is_reported_for_moves_alone(folder: Path) -> None:
    runner = ModelRunner(load_decoder(folder, "float32"), 8, 4)
    row = Row(spec(), (5,), 0, (0,))
    assert runner.execute(step(row)).moves_s == 0.0
    assert runner.execute(step(row, moves=[copy(0, 1)])).moves_s > 0.0
    assert runner.execute(step(moves=[copy(0, 1)])).moves_s > 0.0


def test_many_rows_of_very_different_lengths_say_what_each_says_alone(folder: Path) -> None:
    """Contexts of 1 to 460 tokens: several groups of decoding rows, and chunks beside them."""
    decoder = load_decoder(folder, "float32")
    chooser = random.Random(5)
    lengths = [1, 2, 4, 5, 63, 64, 65, 130, 255, 256, 257, 460, 33, 20]
    together = ModelRunner(decoder, 512, 4)
    blocks = iter(chooser.sample(range(512), 512))
    rows, expected = [], []
    for number, length in enumerate(lengths):
        prompt = [chooser.randrange(3, 250) for _ in range(length)]
        num_late = 1 if number < 12 else 9
        table = [next(blocks) for _ in range(-(-length // 4))]
        one = spec(str(number), length)
        if length > num_late:
            early = Row(one, prompt[:-num_late], 0, table, is_sampled=False)
            together.execute(step(early))
        rows.append(Row(one, prompt[-num_late:], length - num_late, table))
        alone = ModelRunner(decoder, 128, 4)
        whole = Row(one, prompt, 0, range(len(table)))
        expected += alone.execute(step(whole)).token_ids.tolist()
    assert np.array_equal(together.execute(step(*rows)).token_ids, expected)


def test_bfloat16_runs_and_mostly_agrees_with_float32(folder: Path) -> None:
    from engine.engine_settings import EngineSettings
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
