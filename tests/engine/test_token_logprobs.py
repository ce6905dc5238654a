import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.execution.sampler import SampledRows, Sampler
from engine.execution.token_logprobs import prompt_logprobs, token_logprobs
from engine.interface.generation_delta import GenerationDelta
from engine.interface.sampling_params import SamplingParams
from engine.interface.token_logprobs import LEAST_LOGPROB, TokenLogprob
from engine.scheduling.scheduler_output import SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 500


def scores(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(rows)) * 4


def test_entries_do_not_depend_on_what_neighbours_ask_for() -> None:
    # Rounded, so that there are equals at every border.
    logits = scores(30).round()
    token_ids = logits.argmin(dim=-1).numpy()
    counts = [row % 21 for row in range(30)]
    together = token_logprobs(logits, token_ids, counts)
    for row, count in enumerate(counts):
        alone = token_logprobs(logits[row : row + 1], token_ids[row : row + 1], [count])
        assert alone == [together[row]]
        assert len(alone[0].top_ids) == len(alone[0].top_logprobs) == count


def test_the_likeliest_come_first_and_equals_by_their_ids() -> None:
    logits = torch.full((1, VOCAB_SIZE), -9.0)
    logits[0, [400, 30, 200]] = 5.0
    logits[0, 7] = 6.0
    (entry,) = token_logprobs(logits, np.array([200]), [4])
    assert entry.top_ids == (7, 30, 200, 400)
    assert entry.logprob == entry.top_logprobs[2] < entry.top_logprobs[0]


def test_the_impossible_has_a_finite_logprob_and_a_certainty_has_none_to_lose() -> None:
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    logits[0, 3] = 1.0
    (entry,) = token_logprobs(logits, np.array([4]), [3])
    assert entry == TokenLogprob(LEAST_LOGPROB, (3, *entry.top_ids[1:]), (0.0, -9999.0, -9999.0))


def test_a_vocabulary_smaller_than_the_list_is_listed_whole() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 3), np.array([1]), [20])
    assert entry.top_ids == (0, 1, 2)
    assert entry.logprob == pytest.approx(-math.log(3))


def test_a_long_prompt_is_scored_in_pieces_as_it_would_be_at_once() -> None:
    hidden, head = scores(150), torch.randn(VOCAB_SIZE, 40)
    targets = np.arange(150) % 40
    widths: list[int] = []

    def logits_of(begin: int, end: int) -> Tensor:
        widths.append(end - begin)
        return hidden[begin:end] @ head

    entries = prompt_logprobs(logits_of, targets, 2)
    assert entries is not None
    assert sum(widths) == 150
    assert max(widths) < 100
    whole = token_logprobs(hidden @ head, targets, [2] * 150)
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in whole], abs=1e-3)
    hidden[130, 5] = math.nan
    assert prompt_logprobs(logits_of, targets, 2) is None


def test_the_sampler_tells_only_those_who_asked_and_got_a_token() -> None:
    logits = scores(4)
    logits[3, 8] = math.nan
    samplings = [SamplingParams(max_tokens=9, logprobs=wish) for wish in (None, 0, 2, 2)]
    specs = [SequenceSpec(str(i), 0, 1, sampling) for i, sampling in enumerate(samplings)]
    tokens, told = Sampler(frozenset()).sample(
        logits, SampledRows(specs, np.arange(4), np.full(4, 3))
    )
    assert list(told) == [1, 2]
    expected = logits.log_softmax(dim=-1)
    for row, entry in told.items():
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]))
    assert [len(entry.top_ids) for entry in told.values()] == [0, 2]


def test_a_delta_carries_logprobs_over_the_wire() -> None:
    entries = (TokenLogprob(-0.5, (3, 4), (-0.5, -1.0)), TokenLogprob(LEAST_LOGPROB))
    delta = GenerationDelta("r", 0, 0, 0, (3, 5), "ab", logprobs=entries, prompt_logprobs=entries)
    packed = msgspec.msgpack.encode(delta)
    assert msgspec.msgpack.decode(packed, type=GenerationDelta) == delta
    biased = SamplingParams(max_tokens=1, logit_bias=((3, -1.5), (4, 2)), logprobs=3)
    packed = msgspec.msgpack.encode(biased)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == biased
