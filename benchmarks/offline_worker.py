"""An engine in a process of its own that runs one offline work at a time, when it is asked.

    stdin    {"batch": 8, "prompt": 128, "output": 128}    a work, or
             {"say_after": [1, 42, 7], "output": 24}       a prompt whose answer is wanted
    stdout   {"ready": true}, then for each line
             {"tokens_per_s": 750.2}, {"token_ids": [12, 900]} or {"error": "..."}

So several engines can be loaded at once and measured in turn, each while the others sleep.
Standard library only: this file also runs in the environments of other engines.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from benchmarks.offline_work import Generate, OfflineWork, tokens_per_second, warm_up

Answer = dict[str, float] | dict[str, list[int]] | dict[str, str]


def serve_works(load: Callable[[], Generate]) -> None:
    """Load the engine and answer until stdin ends."""

    def begin() -> Callable[[dict[str, object]], Answer]:
        generate, rng = load(), random.Random(1)
        warm_up(generate, rng)

        def answer(asked: dict[str, object]) -> Answer:
            prompt = asked.get("say_after")
            if isinstance(prompt, list):
                return {"token_ids": list(generate([prompt], int(str(asked["output"])))[0])}
            return {"tokens_per_s": tokens_per_second(generate, read_work(asked), rng)}

        return answer

    answer_lines(begin)


def answer_lines(begin: Callable[[], Callable[[dict[str, object]], Answer]]) -> None:
    """Say when `begin` is done, then answer each line with what it returned."""
    # Libraries print what they please to stdout; our answers go out by another door.
    door = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        answer = begin()
        door.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            try:
                reply: Answer = answer(json.loads(line))
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                reply = {"error": f"{type(error).__name__}: {error}"}
            door.write(json.dumps(reply) + "\n")


def read_work(asked: dict[str, object]) -> OfflineWork:
    """The work that a line names."""
    return OfflineWork(**{name: int(str(value)) for name, value in asked.items()})
