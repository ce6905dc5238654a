from dataclasses import replace

import pytest

from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.prefix_keys import block_keys, child_key
from engine.interface.sampling_params import SamplingParams
from engine.interface.sequence_update import SequenceEnd
from engine.scheduling.sequence import sequences_of
from tests.engine.sequences import sequence

REQUEST = GenerationRequest(
    request_id="r",
    prompts=((1, 2, 3), (4, 5)),
    sampling=SamplingParams(max_tokens=5, n=2, stop_token_ids=(9,)),
    priority_class=PriorityClass.BATCH,
    cache_scope="scope",
    arrival=0.0,
    deadline_at=1.0,
    resumed=((7,), (), (), (8, 8)),
)


def test_choices_come_in_order_with_their_prompts_and_what_was_said() -> None:
    sequences = sequences_of(REQUEST, frozenset({0}), 2, child_key)
    assert [one.spec.choice for one in sequences] == [0, 1, 2, 3]
    assert [one.token_ids for one in sequences] == [[1, 2, 3, 7], [1, 2, 3], [4, 5], [4, 5, 8, 8]]
    assert [one.num_output_tokens for one in sequences] == [1, 0, 0, 2]
    assert [one.max_tokens for one in sequences] == [8, 8, 7, 7]
    assert not any(one.is_interactive for one in sequences)
    for one in sequences:
        assert one.prefix.token_ids is one.token_ids
        assert one.prefix.key(0) == block_keys("scope", one.token_ids, 2)[0]


def test_end_tokens_stop_unless_ignored_and_stop_ids_always() -> None:
    assert sequences_of(REQUEST, frozenset({0}), 2, child_key)[0].stop_ids == {0, 9}
    ignoring = replace(REQUEST, sampling=replace(REQUEST.sampling, ignore_eos=True))
    assert sequences_of(ignoring, frozenset({0}), 2, child_key)[0].stop_ids == {9}


def test_an_output_ends_at_its_stop_token_or_its_limit() -> None:
    assert sequence(max_tokens=3, resumed=(5, 6)).end is None
    assert sequence(max_tokens=3, resumed=(5, 6, 7)).end is SequenceEnd.LENGTH
    assert sequence(max_tokens=3, resumed=(5, 0)).end is SequenceEnd.STOP
    assert sequence(max_tokens=3, resumed=(5, 6, 0)).end is SequenceEnd.STOP


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    assert sequence((1, 0)).end is None


@pytest.mark.parametrize(("num_said", "end"), [(1, None), (2, None), (3, SequenceEnd.STOP)])
def test_no_stop_token_ends_an_output_before_its_least_length(
    num_said: int, end: SequenceEnd | None
) -> None:
    one = sequence(resumed=(5,) * (num_said - 1) + (0,))
    one.spec = replace(one.spec, sampling=SamplingParams(max_tokens=8, min_tokens=2))
    assert one.end is end


def test_reports_carry_what_is_known_of_the_sequence() -> None:
    one = sequence()
    one.num_cached_tokens, one.scheduled_at = 2, 5.0
    said = one.told(7, SequenceEnd.LENGTH)
    assert (said.request_id, said.choice, said.token_ids) == ("a", 0, (7,))
    assert (said.end, said.num_cached_tokens, said.scheduled_at) == (SequenceEnd.LENGTH, 2, 5.0)
    failed = one.ended(SequenceEnd.ERROR, "NaN")
    assert (failed.token_ids, failed.end, failed.message) == ((), SequenceEnd.ERROR, "NaN")
    assert (failed.num_cached_tokens, failed.scheduled_at) == (2, 5.0)
