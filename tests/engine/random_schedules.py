"""Schedules by chance: a seed gives one, and a bad one can be made short.

Prompts come from a small family (two long texts cut anywhere, sometimes followed by what an
earlier request answered to them), for only prompts that share beginnings can go wrong together.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.engine.any_schedule import PREDICTORS, AnySchedule, Cancel, Join, Move, Sizes, Steps
from tests.engine.hash_runner import words_alone
from tests.engine.orders import NEVER

TEXTS = (
    (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2, 2, 1, 1, 1, 2, 1, 2, 2, 1, 1, 2, 1, 2),
    (1, 2, 1, 1, 2, 2, 1, 1, 2, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2, 1, 2, 2, 1, 1),
)
NUM_MOVES = 24

PLAIN_SIZES = Sizes(predictor="safe")


def random_schedule(seed: int) -> tuple[Sizes, list[Move]]:
    """The schedule of a seed, for ever the same while this file is."""
    rng = Random(seed)
    return random_crowd(rng) if rng.random() < 0.2 else random_visits(rng)


def random_visits(rng: Random) -> tuple[Sizes, list[Move]]:
    """All kinds of moves in any order."""
    sizes = random_sizes(rng)
    moves: list[Move] = []
    overlaps = rng.choice([0.0, 0.5, 1.0])
    num_joined = 0
    for _ in range(rng.randint(4, NUM_MOVES)):
        kind = rng.random()
        if kind < 0.45:
            moves.append(random_join(rng, num_joined, sizes))
            num_joined += 1
        elif kind < 0.55 and num_joined:
            choice = rng.choice([None, None, 0, 1, 2, 5])
            moves.append(Cancel(rng.randrange(num_joined), choice))
        else:
            moves.append(Steps(rng.choice([1, 1, 2, 3, 8]), rng.random() < overlaps))
    return sizes, moves


def random_crowd(rng: Random) -> tuple[Sizes, list[Move]]:
    """Long answers of the batch class, and interactive ones that push them out time and again."""
    sizes = replace(random_sizes(rng), max_num_seqs=rng.randint(3, 6), predictor="liar")
    longest = sizes.num_blocks * sizes.block_size
    moves: list[Move] = []
    for number in range(rng.randint(6, 12)):
        is_batch = number < 2
        prompt = random_prompt(rng, 4, 0)
        most = longest - len(prompt)
        max_tokens = rng.randint(most * 2 // 3, most) if is_batch else rng.randint(1, most * 2 // 3)
        moves.append(Join(number, (prompt,), max_tokens, seed=number, is_batch=is_batch))
        moves.append(Steps(rng.randint(1, 12), rng.random() < 0.5))
    return sizes, moves


def random_sizes(rng: Random) -> Sizes:
    """Pools that are full all the time, and budgets from starving to ample."""
    return Sizes(
        block_size=rng.choice([2, 3, 4]),
        num_blocks=rng.randint(8, 16),
        num_host_blocks=rng.choice([0, 0, 2, 5, 12]),
        chunk_size=rng.choice([1, 2, 3, 5, 8, 16]),
        max_num_seqs=rng.randint(1, 6),
        spare_budget=rng.choice([0, 1, 3, 6, 12, 24]),
        max_waiting=rng.choice([8, 64, 64]),
        predictor=rng.choice([*PREDICTORS, "liar"]),
        key_bits=rng.choice([128, 128, 8, 1]),
        step_s=rng.choice([0.001, 0.03, 0.5]),
        move_s=rng.choice([0.0, 0.0, 0.02, 5.0]),
        is_eager=rng.random() < 0.5,
    )


def random_join(rng: Random, number: int, sizes: Sizes) -> Join:
    """A request that mostly fits into the pool alone."""
    seed = rng.randrange(2)
    num_slots = sizes.num_blocks * sizes.block_size
    max_tokens = rng.randint(1, min(18, num_slots - 2))
    most = min(24, num_slots - max_tokens) if rng.random() < 0.97 else 24
    prompts = tuple(random_prompt(rng, most, seed) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    n = rng.choice([1, 1, 1, 2, 3, 4])
    num_choices = len(prompts) * n
    is_resumed, is_faulty = rng.random() < 0.15, rng.random() < 0.12
    fault = rng.randrange(num_choices), rng.randrange(most + max_tokens)
    return Join(
        number=number,
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        seed=seed,
        cache_scope=rng.choice("aaab"),
        is_batch=rng.random() < 0.3,
        patience=rng.choice([NEVER] * 8 + [3.0, 12.0]),
        num_resumed=tuple(rng.randint(0, 6) for _ in range(num_choices)) if is_resumed else (),
        faults=(fault,) if is_faulty else (),
    )


def random_prompt(rng: Random, most: int, seed: int) -> tuple[int, ...]:
    """A beginning of one of the texts, perhaps with an answer and a few words of its own."""
    prompt = rng.choice(TEXTS)[: rng.randint(1, max(1, most))]
    kind = rng.random()
    if kind < 0.3:
        prompt += tuple(words_alone(prompt, 12, seed=seed))[: rng.randint(1, 12)]
    if 0.2 < kind < 0.5:
        prompt += tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 3)))
    return prompt[: max(1, most)]


def play(sizes: Sizes, moves: list[Move]) -> Counter[str]:
    """Play one schedule to its end; raises AssertionError where it breaks a law."""
    schedule = AnySchedule(sizes)
    schedule.play(moves)
    return schedule.tally


def shortened(sizes: Sizes, moves: list[Move]) -> tuple[Sizes, list[Move]]:
    """The fewest and plainest of these moves that still go wrong, in the plainest engine."""
    size = len(moves)
    while size >= 1:
        for start in range(len(moves) - size, -1, -1):
            shorter = [*moves[:start], *moves[start + size :]]
            if _goes_wrong(sizes, shorter):
                moves = shorter
        size //= 2
    for name in ("key_bits", "predictor", "num_host_blocks", "move_s", "step_s", "is_eager"):
        plainer = replace(sizes, **{name: getattr(PLAIN_SIZES, name)})
        sizes = plainer if _goes_wrong(plainer, moves) else sizes
    index = 0
    while index < len(moves):
        tries = ([*moves[:index], move, *moves[index + 1 :]] for move in _plainer(moves[index]))
        found = next((tried for tried in tries if _goes_wrong(sizes, tried)), None)
        if found is None:
            index += 1
        else:
            moves = found
    return sizes, moves


def _goes_wrong(sizes: Sizes, moves: list[Move]) -> bool:
    try:
        play(sizes, moves)
    except Exception:  # noqa: BLE001 any kind of failure is the one that is looked for
        return True
    return False


def _plainer(move: Move) -> Iterator[Move]:
    tries: list[Move] = []
    if isinstance(move, Steps):
        tries += [replace(move, is_overlapped=False), replace(move, count=max(1, move.count - 1))]
    if isinstance(move, Join):
        tries += [
            replace(move, faults=()),
            replace(move, num_resumed=()),
            replace(move, patience=NEVER),
            replace(move, is_batch=False),
            replace(move, n=max(1, move.n - 1)),
            replace(move, max_tokens=max(1, move.max_tokens - 1)),
        ]
        for i, prompt in enumerate(move.prompts):
            before, after = move.prompts[:i], move.prompts[i + 1 :]
            tries.append(replace(move, prompts=(*before, *after) or move.prompts))
            tries.append(replace(move, prompts=(*before, prompt[:-1] or prompt, *after)))
    return (plainer for plainer in tries if plainer != move)
