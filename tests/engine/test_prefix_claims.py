from engine.scheduling.prefix_claims import MIN_TAIL_TOKENS, PrefixClaims
from tests.engine.sequences import BLOCK_SIZE, sequence

PROMPT = tuple(range(1, 17))


def claims() -> PrefixClaims:
    made = PrefixClaims(BLOCK_SIZE)
    made.begin_step()
    return made


def test_of_equal_prompts_one_is_computed_and_the_others_wait() -> None:
    made = claims()
    first, *others = (sequence(PROMPT, name=str(i)) for i in range(4))
    assert made.try_claim(first, 0, 8)
    assert not any(made.try_claim(other, 0, 8) for other in others)
    assert made.try_claim(first, 0, 16), "an owner may want more"


def test_different_prompts_do_not_wait_for_each_other() -> None:
    made = claims()
    assert made.try_claim(sequence(PROMPT), 0, 8)
    assert made.try_claim(sequence((9, *PROMPT)), 0, 8)
    assert made.try_claim(sequence(PROMPT, scope="other"), 0, 8)


def test_behind_a_common_beginning_each_goes_its_own_way() -> None:
    made = claims()
    first, second = sequence(PROMPT), sequence((*PROMPT[:8], 99, 99, 99, 99))
    assert made.try_claim(first, 0, 8)
    assert not made.try_claim(second, 0, 8)
    made.begin_step()
    assert made.try_claim(first, 8, 8)
    assert made.try_claim(second, 8, 4)


def test_a_claim_lasts_for_its_step_and_the_next() -> None:
    made = claims()
    first, second = sequence(PROMPT), sequence(PROMPT)
    assert made.try_claim(first, 0, 4)
    made.begin_step()
    assert not made.try_claim(second, 0, 4)
    made.begin_step()
    assert made.try_claim(second, 0, 4), "its owner stood still for a step"
    assert not made.try_claim(first, 0, 4)


def test_an_owner_that_goes_on_keeps_its_claim() -> None:
    made = claims()
    first, second = sequence(PROMPT), sequence(PROMPT)
    for _ in range(5):
        assert made.try_claim(first, 0, 4)
        assert not made.try_claim(second, 0, 4)
        made.begin_step()


def test_who_is_within_a_block_goes_on() -> None:
    made = claims()
    assert made.try_claim(sequence(PROMPT), 0, 16)
    assert made.try_claim(sequence(PROMPT), 2, 4)


def test_a_refused_claim_leaves_nothing_behind() -> None:
    made = claims()
    assert made.try_claim(sequence(PROMPT[:4]), 0, 4)
    assert not made.try_claim(sequence(PROMPT), 0, 16)
    assert made.try_claim(sequence(PROMPT), 4, 12)


def test_a_tail_is_claimed_when_it_is_worth_the_waiting() -> None:
    size = MIN_TAIL_TOKENS + 2
    for num_tail, waits in ((MIN_TAIL_TOKENS, True), (MIN_TAIL_TOKENS - 1, False)):
        made = PrefixClaims(size)
        made.begin_step()
        prompt = PROMPT[:num_tail]
        twins = [sequence(prompt, name=str(i), block_size=size) for i in range(2)]
        assert made.try_claim(twins[0], 0, num_tail)
        assert made.try_claim(twins[1], 0, num_tail) != waits
