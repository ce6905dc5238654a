import numpy as np

from engine.interface.sampling_params import SamplingParams
from engine.scheduling.scheduler_output import PENDING
from engine.scheduling.token_history import TokenHistory
from tests.engine.steps import Row, spec, step


def test_a_history_follows_its_list_and_what_it_gave_stays_as_it_was() -> None:
    token_ids = [1, 2, 3]
    history = TokenHistory(token_ids)
    before = history.tokens(is_pending=True)
    for token_id in range(4, 40):
        assert history.tokens(is_pending=True).tolist() == [*token_ids, PENDING]
        token_ids.append(token_id)
        if token_id % 3:
            assert history.tokens(is_pending=False).tolist() == token_ids
    assert before.tolist() == [1, 2, 3, PENDING]


def test_a_pending_token_is_filled_in_behind_the_history_too() -> None:
    penalised = SamplingParams(max_tokens=9, presence_penalty=1.0)
    rows = [
        Row(spec(name, 2, penalised), (5,), 1, (0,), slot=slot)
        for name, slot in (("a", 4), ("b", 2))
    ]
    before = step(*rows)
    for row in rows:
        row.token_ids, row.start = (PENDING,), 2
    histories = {0: np.array([4, 5, PENDING]), 1: np.array([4, 5, PENDING])}
    work = step(*rows[::-1], histories=histories).with_sampled(before, np.array([70, 80]))
    assert work.token_ids.tolist() == [80, 70]
    assert {row: tokens.tolist() for row, tokens in work.histories.items()} == {
        0: [4, 5, 80],
        1: [4, 5, 70],
    }
    assert histories[0].tolist() == [4, 5, PENDING]
