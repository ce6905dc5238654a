"""Any schedule gives the same words: the one rule of the engine, on a model that hears all."""

import time
from collections import Counter
from dataclasses import replace

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.engine.any_schedule import PREDICTORS, AnySchedule, Cancel, Join, Move, Sizes, Steps
from tests.engine.hash_runner import words_alone
from tests.engine.orders import NEVER
from tests.engine.random_schedules import TEXTS, play, random_schedule, shortened

NUM_FIXED_SEEDS = 200
NUM_FRESH_SEEDS = 40

# Schedules that once went wrong.
FAILED_SEEDS: tuple[int, ...] = (43512144805,)

# In so many of a hundred schedules each of these happens, or they prove too little.
HAZARDS = {
    "preemptions": 35,
    "thrice_preempted": 3,
    "recomputed_tokens": 30,
    "offloaded": 25,
    "loaded": 10,
    "copied": 50,
    "hits": 70,
    "partial_hits": 50,
    "failed": 10,
    "cancelled": 20,
    "deadline": 20,
    "refused": 5,
}

tails = st.lists(st.integers(1, 2), max_size=3).map(tuple)
prompts = st.builds(
    lambda text, cut, tail: text[:cut] + tail, st.sampled_from(TEXTS), st.integers(1, 14), tails
)
joins = st.builds(
    Join,
    number=st.just(0),
    prompts=st.lists(prompts, min_size=1, max_size=2).map(tuple),
    max_tokens=st.integers(1, 14),
    n=st.integers(1, 4),
    seed=st.integers(0, 1),
    cache_scope=st.sampled_from("ab"),
    is_batch=st.booleans(),
    patience=st.sampled_from([NEVER, NEVER, NEVER, 3.0, 12.0]),
    num_resumed=st.just(()) | st.lists(st.integers(0, 5), max_size=8).map(tuple),
    faults=st.just(()) | st.just(()) | st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 24))),
)
sizes = st.builds(
    Sizes,
    block_size=st.integers(2, 4),
    num_blocks=st.integers(8, 16),
    num_host_blocks=st.integers(0, 12),
    chunk_size=st.integers(1, 16),
    max_num_seqs=st.integers(1, 6),
    spare_budget=st.integers(0, 24),
    predictor=st.sampled_from(PREDICTORS),
    key_bits=st.sampled_from([128, 8, 1]),
    step_s=st.sampled_from([0.001, 0.03, 0.5]),
    move_s=st.sampled_from([0.0, 0.02, 5.0]),
    is_eager=st.booleans(),
)


class Schedules(RuleBasedStateMachine):
    """The same moves as by chance, chosen by Hypothesis; we shorten them far faster than it."""

    @initialize(sizes=sizes)
    def start(self, sizes: Sizes) -> None:
        self.schedule = AnySchedule(sizes)
        self.moves: list[Move] = []

    @rule(join=joins)
    def join(self, join: Join) -> None:
        number = sum(isinstance(move, Join) for move in self.moves)
        self._make(replace(join, number=number))

    @rule(cancel=st.builds(Cancel, st.integers(0, 9), st.none() | st.integers(0, 6)))
    def cancel(self, cancel: Cancel) -> None:
        self._make(cancel)

    @rule(steps=st.builds(Steps, st.integers(1, 4), st.booleans()))
    def step(self, steps: Steps) -> None:
        self._make(steps)

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self._make(None)

    def _make(self, move: Move | None) -> None:
        try:
            if move is None:
                self.schedule.finish()
            else:
                self.moves.append(move)
                self.schedule.apply(move)
        except Exception as error:
            short_sizes, short_moves = shortened(self.schedule.sizes, self.moves)
            error.add_note("\n".join(map(repr, (short_sizes, *short_moves))))
            raise


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=80, stateful_step_count=24, deadline=None, phases=[Phase.generate]
)


def test_hundreds_of_random_schedules_give_the_same_words_and_meet_every_hazard() -> None:
    met: Counter[str] = Counter()
    for seed in range(NUM_FIXED_SEEDS):
        met.update(name for name, count in _tally_of(seed).items() if count)
    missing = {
        name: met[name]
        for name, share in HAZARDS.items()
        if met[name] * 100 < share * NUM_FIXED_SEEDS
    }
    assert not missing, f"of {NUM_FIXED_SEEDS} schedules too few have {missing}"


def test_schedules_that_once_went_wrong_or_are_new_give_the_same_words() -> None:
    first = time.time_ns() % 10**12
    for seed in (*FAILED_SEEDS, *range(first, first + NUM_FRESH_SEEDS)):
        _tally_of(seed)


def test_the_hash_model_hears_every_token() -> None:
    prompt = tuple(range(1, 9))
    words = {tuple(words_alone(prompt, 8))}
    for i in range(len(prompt)):
        words.add(tuple(words_alone((*prompt[:i], 40, *prompt[i + 1 :]), 8)))
    assert len(words) == len(prompt) + 1


def _tally_of(seed: int) -> Counter[str]:
    try:
        return play(*random_schedule(seed))
    except Exception as error:
        error.add_note(f"seed {seed}; any_schedule_long --seed {seed} prints it shortened")
        raise
