"""Every finished output is valid: random JSON schemas on a real model, through the engine.

A small model left to itself writes hardly any valid JSON, let alone by a schema it was never
shown; so each valid output is the grammar's work. An output that reaches its token limit may be
cut, and says so.
"""

import json
import time
from collections import Counter
from pathlib import Path
from random import Random

import jsonschema

from benchmarks.random_schemas import random_schema
from engine.engine_settings import EngineSettings
from engine.from_folder import engine_from_folder
from engine.grammar.grammar_compiler import GrammarCompiler
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.grammar import Grammar
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

_PROMPT = "Here is an example of a record in our database, as JSON:\n"


def main(folder: Path, num_schemas: int, max_tokens: int) -> None:
    """Print what became of the outputs; SystemExit 1 if any that finished is not valid."""
    random = Random(0)
    schemas = [random_schema(random) for _ in range(num_schemas)]
    accepted = _compile(folder, schemas)
    ends, outputs, seconds = _generate(folder, accepted, max_tokens)
    tokenizer = Tokenizer.from_folder(folder)
    counts: Counter[str] = Counter()
    for schema, end, token_ids in zip(accepted, ends, outputs, strict=True):
        fault = _fault(tokenizer, schema, token_ids) if end is SequenceEnd.STOP else None
        counts[str(end)] += 1
        if fault is not None:
            counts["not valid"] += 1
            print(f"NOT VALID: {fault}\n  {json.dumps(schema, ensure_ascii=False)}")
    num_tokens = sum(map(len, outputs))
    print(f"{len(accepted)} outputs of {num_tokens} tokens in {seconds:.0f} s: {dict(counts)}")
    print(f"finished and not valid: {counts['not valid']}  (bar: 0)")
    if counts["not valid"] or counts[SequenceEnd.ERROR]:
        raise SystemExit(1)


def _compile(folder: Path, schemas: list[dict[str, object]]) -> list[dict[str, object]]:
    """Those that can be served."""
    compiler = GrammarCompiler(folder)
    compiler.start()
    accepted, times, refusals = [], [], []
    for schema in schemas:
        start = time.perf_counter()
        try:
            compiler.check_blocking(Grammar.json_schema(schema))
            accepted.append(schema)
        except InvalidRequest as refusal:
            refusals.append(str(refusal))
        times.append(1e3 * (time.perf_counter() - start))
    compiler.close()
    times.sort()
    print(
        f"{len(schemas)} schemas, {len(refusals)} refused; compiled and tried out in ms: ", end=""
    )
    print(f"p50 {times[len(times) // 2]:.1f}, p99 {times[-len(times) // 100]:.1f}, ", end="")
    print(f"most {times[-1]:.1f}")
    for reason, count in Counter(refusals).most_common(5):
        print(f"  refused {count} times: {reason}")
    return accepted


def _generate(
    folder: Path, schemas: list[dict[str, object]], max_tokens: int
) -> tuple[list[SequenceEnd], list[list[int]], float]:
    settings = EngineSettings(num_blocks=2048, max_waiting=len(schemas))
    engine = engine_from_folder(folder, settings)
    prompt = Tokenizer.from_folder(folder).encode_plain(_PROMPT)
    for i, schema in enumerate(schemas):
        sampling = SamplingParams(max_tokens, seed=i, grammar=Grammar.json_schema(schema))
        engine.add(
            GenerationRequest(
                str(i), (prompt,), sampling, PriorityClass.INTERACTIVE, "own", 0.0, 1e12
            )
        )
    outputs: list[list[int]] = [[] for _ in schemas]
    ends = [SequenceEnd.ERROR] * len(schemas)
    start = time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            outputs[int(update.request_id)] += update.token_ids
            if update.end is not None:
                ends[int(update.request_id)] = update.end
            if update.message:
                print(f"{update.end}: {update.message}")
    seconds = time.perf_counter() - start
    engine.close()
    return ends, outputs, seconds


def _fault(tokenizer: Tokenizer, schema: dict[str, object], token_ids: list[int]) -> str | None:
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push(token_ids) + detokenizer.flush()
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text}\n  {error}"
    return None
