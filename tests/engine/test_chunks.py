import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.chunks import OLDEST_PARTS, service_order

BATCH_RANK = 1 << 48


def order_of(
    prompts: list[tuple[int, int, bool]], chunk_size: int = 8, budget: int = 16
) -> list[tuple[int, int]]:
    """Prompts as (tokens owed, age rank, is it batch class)."""
    owed = np.array([owed for owed, _, _ in prompts], np.int64)
    rank = np.array([rank + BATCH_RANK * batch for _, rank, batch in prompts], np.int64)
    is_batch = np.array([batch for _, _, batch in prompts], np.bool_)
    return service_order(owed, rank, is_batch, chunk_size, budget)


def test_nobody_is_served_when_nobody_owes() -> None:
    assert order_of([]) == []


def test_a_lone_prompt_gets_whole_chunks() -> None:
    assert order_of([(100, 0, False)]) == [(0, 8)]


def test_the_oldest_is_sure_of_a_quarter_and_then_short_prompts_go_first() -> None:
    order = order_of([(100, 0, False), (100, 1, False), (8, 2, False), (3, 3, False)])
    assert order[0] == (0, 16 // OLDEST_PARTS)
    assert [index for index, _ in order[1:]] == [2, 3, 0, 1]
    assert all(most == 8 for _, most in order[1:])


def test_interactive_prompts_go_before_shorter_batch_ones() -> None:
    order = order_of([(2, 0, True), (100, 5, False), (3, 1, True), (50, 4, False)])
    assert [index for index, _ in order] == [3, 3, 1, 0, 2]


def test_even_the_smallest_step_has_a_token_for_the_oldest() -> None:
    assert order_of([(100, 0, False), (1, 1, False)], budget=1)[0] == (0, 1)


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 50), st.booleans()),
        min_size=1,
        max_size=12,
        unique_by=lambda prompt: prompt[1],
    ),
    st.integers(1, 64),
    st.integers(1, 256),
)
def test_served_until_the_budget_is_spent_nobody_is_passed_over(
    prompts: list[tuple[int, int, bool]], chunk_size: int, budget: int
) -> None:
    order = order_of(prompts, chunk_size, budget)
    assert {index for index, _ in order} == set(range(len(prompts)))
    granted = [0] * len(prompts)
    left = budget
    for index, most in order:
        more = min(most - granted[index], prompts[index][0] - granted[index], left)
        if more > 0:
            granted[index] += more
            left -= more
    assert max(granted) <= chunk_size
    oldest = min(range(len(prompts)), key=lambda i: (prompts[i][2], prompts[i][1]))
    assert granted[oldest] >= min(prompts[oldest][0], chunk_size, max(1, budget // OLDEST_PARTS))
    # A batch prompt gets something only when every interactive one has its chunk.
    if any(granted[i] for i, prompt in enumerate(prompts) if prompt[2]):
        assert all(
            granted[i] >= min(prompt[0], chunk_size)
            for i, prompt in enumerate(prompts)
            if not prompt[2]
        )
