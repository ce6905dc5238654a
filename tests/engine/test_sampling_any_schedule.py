"""Logprobs under schedules chosen by chance, with a model that names what it was asked about."""

import random
from collections import Counter, defaultdict

from engine.engine import Engine
from engine.engine_settings import EngineSettings
from engine.execution.runner import ModelLimits
from engine.execution.scripted_runner import ScriptedRunner
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.any_schedule import FixedPredictor
from tests.engine.orders import NEVER

EOS = 0
LIMITS = ModelLimits(50, 10_000, frozenset({EOS}))
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 4, 4


class Play:
    """One random schedule. A top list's first token is the token that it is about."""

    def __init__(self, seed: int, tally: Counter[str]) -> None:
        self._chooser = random.Random(seed)
        self._tally = tally
        limits, chooser = LIMITS, self._chooser
        runner = ScriptedRunner(limits, NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS)
        settings = EngineSettings(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            max_num_batched_tokens=4 + chooser.choice([4, 12]),
            chunk_size=chooser.choice([2, 5, 8]),
            max_num_seqs=4,
            inter_token_target_s=100.0,
        )
        self._engine = Engine(runner, settings, predictor=FixedPredictor("liar"))
        self._requests: dict[str, GenerationRequest] = {}
        self._words: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._named: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._scored: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._ends: dict[tuple[str, int], SequenceEnd] = {}

    def run(self) -> None:
        chooser = self._chooser
        num_to_come = 7
        while num_to_come or self._engine.has_work:
            if num_to_come and chooser.random() < 0.8:
                num_to_come -= 1
                self._join(f"r{num_to_come}")
            if self._requests and chooser.random() < 0.02:
                self._engine.cancel(chooser.choice(list(self._requests)))
            self._step()
        self._judge()
        self._tally["preemptions"] += self._engine.stats().preemptions_total
        self._tally["cached"] += self._engine.stats().cached_tokens_total

    def _join(self, request_id: str) -> None:
        chooser = self._chooser
        prompt = tuple(range(1, 1 + chooser.randrange(1, 26)))
        sampling = SamplingParams(
            max_tokens=chooser.choice([0, 1, 9, 20]),
            n=chooser.choice([1, 1, 2]),
            logprobs=chooser.choice([None, 1]),
            prompt_logprobs=1,
            presence_penalty=chooser.choice([0.0, 1.0]),
        )
        if sampling.max_tokens and chooser.random() < 0.4:
            sampling = SamplingParams(max_tokens=sampling.max_tokens, logprobs=2)
        request = GenerationRequest(
            request_id=request_id,
            prompts=(prompt,),
            sampling=sampling,
            priority_class=chooser.choice(list(PriorityClass)),
            cache_scope="a",
            arrival=0.0,
            deadline_at=NEVER,
        )
        self._requests[request_id] = request
        self._engine.add(request)

    def _step(self) -> None:
        is_overlapped = self._chooser.random() < 0.7
        updates = self._engine.step_overlapped() if is_overlapped else self._engine.step()
        self._engine.check()
        for update in updates:
            key = update.request_id, update.choice
            scored = update.prompt_logprobs or ()
            assert not (scored and self._words[key]), "a prompt is scored before its first word"
            assert update.prompt_logprobs != ()
            self._words[key] += update.token_ids
            self._named[key] += [entry.top_ids[0] for entry in update.logprobs or ()]
            self._scored[key] += [entry.top_ids[0] for entry in scored]
            if update.end is not None:
                self._ends[key] = update.end

    def _judge(self) -> None:
        for request_id, request in self._requests.items():
            for choice in range(request.num_choices):
                key, sampling, prompt = (request_id, choice), request.sampling, request.prompts[0]
                end, words, scored = self._ends[key], self._words[key], self._scored[key]
                self._tally[end] += 1
                owed = [] if sampling.prompt_logprobs is None else list(prompt[1:])
                assert words == [*prompt, EOS][: len(words)]
                assert self._named[key] == ([] if sampling.logprobs is None else words)
                if end is SequenceEnd.CANCELLED and not words:
                    assert scored == owed[: len(scored)]
                    continue
                assert scored == owed
                if end is not SequenceEnd.CANCELLED:
                    assert len(words) == min(sampling.max_tokens, len(prompt) + 1)


def test_every_logprob_is_reported_once_in_its_place_in_any_schedule() -> None:
    tally: Counter[str] = Counter()
    for seed in range(150):
        Play(seed, tally).run()
    assert tally["preemptions"] > 120
    assert tally["cached"] > 500
    assert min(tally[end] for end in ("stop", "length", "cancelled")) > 50
