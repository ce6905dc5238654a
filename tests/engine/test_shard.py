"""How a model is shared out, and how parts are added up again."""

import torch
from torch import Tensor

from engine.layers.shard import WHOLE, Shard
from tests.engine.meeting_threads import on_ranks


class Parts:
    """A RankGroup that was given what it gathers."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def gather(self, part: Tensor) -> list[Tensor]:
        return self.parts


def test_shares_are_all_of_it_in_order_and_nearly_equal() -> None:
    for size in range(1, 9):
        for total in range(size, 40):
            spans = [Shard(rank, size).span(total, 3) for rank in range(size)]
            rows = [row for span in spans for row in range(span.start, span.stop)]
            assert rows == list(range(3 * total))
            lengths = [span.stop - span.start for span in spans]
            assert max(lengths) - min(lengths) <= 3
            assert min(lengths) >= 3


def test_three_kv_heads_over_two_ranks_are_one_and_two() -> None:
    assert [Shard(rank, 2).span(3, 64) for rank in (0, 1)] == [slice(0, 64), slice(64, 192)]


def test_parts_are_added_in_the_order_of_ranks_whoever_adds() -> None:
    # In float32 this depends on the order: from the left it is 0, from the right 1.
    parts = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    sums = on_ranks(3, lambda shard: shard.sum(parts[shard.rank]))
    assert [s.item() for s in sums] == [0.0, 0.0, 0.0]


def test_narrow_parts_are_added_in_float32_and_rounded_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    total = Shard(1, 3, Parts(parts)).sum(parts[1])
    assert total.dtype is torch.bfloat16
    assert total.item() == 258.0, "rounded after each part, it would be 256"


def test_a_model_in_one_piece_adds_nothing() -> None:
    part = torch.ones(3)
    assert WHOLE.sum(part) is part
