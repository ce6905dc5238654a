"""Any schedule gives the same words: the one rule of the engine, on a model that hears all."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.engine import Engine, EngineSettings
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from tests.engine.hash_runner import VOCAB_SIZE, HashRunner, words_alone
from tests.engine.orders import NEVER, Transcript

BLOCK_SIZE = 4
NORMAL_ENDS = {SequenceEnd.STOP, SequenceEnd.LENGTH}

tokens = st.integers(1, VOCAB_SIZE - 1)


class Schedules(RuleBasedStateMachine):
    """Joins, cancels and deadlines at any time, in pools of 8 to 16 blocks."""

    @initialize(
        num_blocks=st.integers(8, 16),
        chunk_size=st.integers(1, 16),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
    )
    def start(self, num_blocks: int, chunk_size: int, max_num_seqs: int, spare_budget: int) -> None:
        self.now = 0.0
        self.num_slots = num_blocks * BLOCK_SIZE
        self.engine = Engine(
            HashRunner(num_blocks, BLOCK_SIZE),
            EngineSettings(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_num_batched_tokens=max_num_seqs + spare_budget,
                chunk_size=chunk_size,
                max_num_seqs=max_num_seqs,
            ),
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.transcript = Transcript()

    @rule(
        prompts=st.lists(st.lists(tokens, min_size=1, max_size=14), min_size=1, max_size=2),
        max_tokens=st.integers(1, 18),
        n=st.integers(1, 3),
        seed=st.integers(0, 5),
        is_batch=st.booleans(),
        patience=st.sampled_from([3.0, 9.0, NEVER, NEVER]),
        num_resumed=st.integers(0, 5),
    )
    def join(
        self,
        *,
        prompts: list[list[int]],
        max_tokens: int,
        n: int,
        seed: int,
        is_batch: bool,
        patience: float,
        num_resumed: int,
    ) -> None:
        request = GenerationRequest(
            request_id=str(len(self.requests)),
            prompts=tuple(tuple(prompt) for prompt in prompts),
            sampling=SamplingParams(max_tokens=max_tokens, n=n, seed=seed),
            priority_class=PriorityClass.BATCH if is_batch else PriorityClass.INTERACTIVE,
            cache_scope="scope",
            arrival=self.now,
            deadline_at=self.now + patience,
            resumed=tuple(
                tuple(words_alone(tuple(prompt), max_tokens, seed=seed, choice=i * n + j))[
                    :num_resumed
                ]
                for i, prompt in enumerate(prompts)
                for j in range(n)
            ),
        )
        self.requests[request.request_id] = request
        self.engine.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        choice = data.draw(st.none() | st.integers(0, 6))
        self.engine.cancel(request_id, choice)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 1
            self.transcript.note(self.engine.step())
            self.engine.check()

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        while self.engine.has_work:
            self.step(1)
        stats = self.engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        assert stats.projected_free_tokens == self.num_slots
        for request in self.requests.values():
            for choice in range(request.num_choices):
                self._judge(request, choice)

    def _judge(self, request: GenerationRequest, choice: int) -> None:
        key = request.request_id, choice
        said = [*request.resumed_of(choice), *self.transcript.token_ids[key]]
        alone = words_alone(
            request.prompt_of(choice),
            request.sampling.max_tokens,
            seed=request.sampling.seed,
            choice=choice,
        )
        if self.transcript.ends[key] in NORMAL_ENDS:
            assert said == alone
        else:
            assert said == alone[: len(said)]


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_hash_model_hears_every_token() -> None:
    prompt = tuple(range(1, 9))
    words = {tuple(words_alone(prompt, 8))}
    for i in range(len(prompt)):
        words.add(tuple(words_alone((*prompt[:i], 40, *prompt[i + 1 :]), 8)))
    assert len(words) == len(prompt) + 1
