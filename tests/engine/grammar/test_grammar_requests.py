"""Requests with a grammar, through the whole engine, on a model that would say anything."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.model_runner import ModelRunner
from engine.execution.scripted_runner import ScriptedRunner
from engine.from_folder import engine_from_folder
from engine.grammar.grammar_compiler import GrammarCompiler
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest
from engine.interface.grammar import Grammar, GrammarKind
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.models.loader import load_decoder
from engine.text.tokenizer import Tokenizer
from tests.engine.any_schedule import FixedPredictor
from tests.engine.grammar.hostile import BOMB
from tests.engine.grammar.walks import text_of
from tests.engine.orders import Transcript, order, run_to_end

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "tags": {"type": "array", "items": {"enum": ["x", "größe", None]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
OBJECT = Grammar.json_schema(SCHEMA)
LETTERS = Grammar(GrammarKind.REGEX, "[ab]{2,40}")
PROMPT = (1, 30, 31, 32)
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def engine(small_folder: Path) -> Iterator[Engine]:
    settings = EngineSettings(num_blocks=512, max_num_batched_tokens=64, chunk_size=16)
    engine = engine_from_folder(small_folder, settings, dtype="float32")
    yield engine
    engine.close()


def hot(grammar: Grammar | None, seed: int, **changes: Any) -> SamplingParams:
    plain = SamplingParams(max_tokens=400, temperature=2.0, seed=seed, grammar=grammar)
    return replace(plain, **changes)


def said(
    engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams, **changes: Any
) -> tuple[str, SequenceEnd]:
    """The text without its end token, and the end."""
    engine.add(order("r", PROMPT, sampling, **changes))
    transcript = run_to_end(engine)
    token_ids = [*changes.get("resumed", ((),))[0], *transcript.token_ids["r", 0]]
    text_ids = [i for i in token_ids if i not in tokenizer.eos_token_ids]
    return text_of(tokenizer, text_ids), transcript.ends["r", 0]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_batch_of_grammars_and_of_none_is_each_what_it_should_be(
    engine: Engine, small_tokenizer: Tokenizer, is_overlapped: bool
) -> None:
    for i in range(6):
        engine.add(order(f"object {i}", PROMPT, hot(OBJECT, i)))
        engine.add(order(f"letters {i}", PROMPT, hot(LETTERS, i)))
        engine.add(order(f"plain {i}", PROMPT, hot(None, i, max_tokens=30)))
        engine.add(order(f"greedy {i}", PROMPT, hot(OBJECT, i, temperature=0.0, max_tokens=60)))
    transcript = run_to_end(engine, is_overlapped=is_overlapped)
    for (name, _), token_ids in transcript.token_ids.items():
        end = transcript.ends[name, 0]
        if name.startswith("plain"):
            assert end in (SequenceEnd.STOP, SequenceEnd.LENGTH)
        elif end is SequenceEnd.STOP:
            text = text_of(small_tokenizer, token_ids[:-1])
            if name.startswith("letters"):
                assert re.fullmatch("[ab]{2,40}", text)
            else:
                jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert end is SequenceEnd.LENGTH
    assert sum(end is SequenceEnd.STOP for end in transcript.ends.values()) >= 12


def test_an_output_that_cannot_go_on_is_ended_by_an_end_token(
    engine: Engine, small_tokenizer: Tokenizer
) -> None:
    choice = Grammar.choice(["hello"])
    for changes in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"logit_bias": ((2, -100.0),)}):
        text, end = said(engine, small_tokenizer, hot(choice, 3, **changes))
        assert (text, end) == ("hello", SequenceEnd.STOP)


def test_it_goes_on_while_it_can_when_more_is_wanted(
    engine: Engine, small_tokenizer: Tokenizer
) -> None:
    # Each token is one letter.
    assert len(said(engine, small_tokenizer, hot(LETTERS, 3, ignore_eos=True))[0]) == 40
    for seed in range(5):
        text, end = said(engine, small_tokenizer, hot(LETTERS, seed, min_tokens=20))
        assert re.fullmatch("[ab]{20,40}", text)
        assert end is SequenceEnd.STOP


def test_a_stop_token_ends_a_complete_output_only(
    engine: Engine, small_tokenizer: Tokenizer
) -> None:
    (a,) = (i for i in small_tokenizer.encode_plain("xa") if small_tokenizer.token_bytes(i) == b"a")
    twins = [i for i in range(small_tokenizer.vocab_size) if small_tokenizer.token_bytes(i) == b"a"]
    # The model holds the stop token to be likely, but there is text before it.
    sampling = hot(Grammar(GrammarKind.REGEX, "(xa){3}b"), 1, stop_token_ids=(a,))
    sampling = replace(sampling, logit_bias=((a, 100.0),))
    text, end = said(engine, small_tokenizer, sampling)
    assert (text, end) == ("xaxaxaba", SequenceEnd.STOP)
    # Where the grammar leaves nothing else, it is both: text and a stop.
    sampling = replace(sampling, stop_token_ids=tuple(twins))
    text, end = said(engine, small_tokenizer, sampling)
    assert (text, end) == ("xa", SequenceEnd.STOP)


def test_the_limit_cuts_and_says_so(engine: Engine, small_tokenizer: Tokenizer) -> None:
    text, end = said(engine, small_tokenizer, hot(OBJECT, 1, max_tokens=5))
    assert end is SequenceEnd.LENGTH
    assert len(text) <= 5


def test_resumed_anywhere_it_says_the_same(engine: Engine, small_tokenizer: Tokenizer) -> None:
    engine.add(order("whole", PROMPT, hot(OBJECT, 8)))
    token_ids = tuple(run_to_end(engine).token_ids["whole", 0])
    assert len(token_ids) > 12
    expected = text_of(small_tokenizer, list(token_ids[:-1]))
    for middle in range(0, len(token_ids) + 1, 5):
        text, end = said(engine, small_tokenizer, hot(OBJECT, 8), resumed=(token_ids[:middle],))
        assert (text, end) == (expected, SequenceEnd.STOP)


def test_who_loses_its_place_says_the_same(
    engine: Engine, small_folder: Path, compiler: GrammarCompiler
) -> None:
    requests = [order(str(i), PROMPT, hot(OBJECT, i, max_tokens=60, n=2)) for i in range(4)]
    transcripts = []
    tight_settings = EngineSettings(
        block_size=BLOCK_SIZE, num_blocks=40, max_num_batched_tokens=40, chunk_size=8
    )
    runner = ModelRunner(
        load_decoder(small_folder, "float32"), 40, BLOCK_SIZE, 0, compiler.new_rows()
    )
    tight = Engine(runner, tight_settings, grammars=compiler, predictor=FixedPredictor("liar"))
    for one in (engine, tight):
        for request in requests:
            one.add(request)
        transcripts.append(run_to_end(one, Transcript()))
    assert tight.stats().preemptions_total > 0
    assert transcripts[0].token_ids == transcripts[1].token_ids
    assert transcripts[0].ends == transcripts[1].ends


def test_logprobs_are_those_without_the_grammar(engine: Engine) -> None:
    entries = []
    for grammar in (OBJECT, None):
        engine.add(order("r", PROMPT, hot(grammar, 2, max_tokens=1, logprobs=3)))
        while engine.has_work:
            entries += [entry for update in engine.step() for entry in update.logprobs or ()]
    masked, plain = entries
    assert masked.top_ids == plain.top_ids
    assert masked.top_logprobs == pytest.approx(plain.top_logprobs, abs=1e-5)
    assert masked.logprob < masked.top_logprobs[0]


def test_a_bad_grammar_fails_alone_and_before_it_is_queued(engine: Engine) -> None:
    for grammar in (BOMB, Grammar(GrammarKind.REGEX, "("), Grammar(GrammarKind.REGEX, "")):
        with pytest.raises(InvalidRequest) as refusal:
            engine.add(order("bad", PROMPT, hot(grammar, 0)))
        assert refusal.value.param == "response_format"
    assert not engine.has_work


def test_an_engine_without_a_compiler_takes_no_grammar(engine: Engine) -> None:
    scripted = Engine(
        ScriptedRunner(engine.limits, 64, 4), EngineSettings(num_blocks=64, block_size=4)
    )
    with pytest.raises(InvalidRequest) as refusal:
        scripted.add(order("r", PROMPT, hot(OBJECT, 0, max_tokens=8)))
    assert refusal.value.code == "unsupported_parameter"


def test_a_grammar_travels_with_its_request() -> None:
    request = order("r", PROMPT, hot(OBJECT, 0))
    raw = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(raw, type=GenerationRequest) == request
    assert msgspec.json.decode(msgspec.json.encode(request), type=GenerationRequest) == request
