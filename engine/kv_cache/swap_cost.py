"""Decides by measured cost: keep a preempted sequence's KV on the host, or compute it again.

Moving costs a fixed part and a part per block, out now and in later; recomputing costs time per
token, later. What may never be wanted again (the KV of a finished conversation) pays the way
out for certain and everything else only as often as it is used again.
"""

from collections import deque
from statistics import median

# Moves remembered, and how many must be measured before they are believed: the first ones pay
# for pinning memory and waking the copy engine.
WINDOW = 32
MIN_MEASUREMENTS = 5
# Slopes that a line is believed from; before, moving costs the median per block.
MIN_SLOPES = 3
# When so many moves in a row took more than twice what was expected, or all less than half, the
# machine has changed, and only these count. One slow move is nothing.
SURPRISE_RATIO = 2.0
# After so many refusals in a row nothing recent is known of moving, and a probe may be paid
# for: with this share of what the decisions cost in all.
REFUSALS_BEFORE_PROBE = 32
PROBE_SHARE = 0.01

# Idle blocks remembered, and what is believed before any came back: as if so many had been
# seen, half of them used again.
IDLE_MEMORY = 4096.0
IDLE_PRIOR_BLOCKS = 64.0
IDLE_PRIOR_REUSE = 0.5


class SwapCost:
    """What moving blocks costs, what recomputing them would, and how many are used again.

    The cost of a move is the line through the last WINDOW measurements by the "incomplete"
    method of Theil ("A rank-invariant method of linear and polynomial regression analysis",
    1950): the median slope between pairs of a smaller and a larger move. Up to a quarter of
    the measurements may be wild.
    Until MIN_MEASUREMENTS have come, moving counts as free, so that the first offloads happen
    and get measured.

    A model that only measures what it chooses can be wrong for ever. So an offload that looks
    dearer is chosen now and then, when no move was measured during the last
    REFUSALS_BEFORE_PROBE decisions or the last one was surprisingly fast, and its extra cost
    is within PROBE_SHARE of all costs. `is_probing` says that the last answer was such a choice:
    it holds for those blocks alone, and not for others like them.

    For one thread.
    """

    def __init__(self) -> None:
        self._moves: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._line: tuple[float, float] | None = None
        self._surprises: list[bool] = []
        self._num_refusals = 0
        self._probe_budget_s = 0.0
        self.is_probing = False
        self._num_idle_hits = 0.0
        self._num_idle_unused = 0.0

    @property
    def idle_reuse(self) -> float:
        """Of the idle blocks that went to the host, the share used again; in (0, 1)."""
        num_offloaded = self._num_idle_hits + self._num_idle_unused
        num_hits = self._num_idle_hits + IDLE_PRIOR_BLOCKS * IDLE_PRIOR_REUSE
        return num_hits / (num_offloaded + IDLE_PRIOR_BLOCKS)

    def observe_moves(self, num_blocks: int, seconds: float) -> None:
        """A step moved so many blocks between device and host, which took `seconds`."""
        if num_blocks < 1 or seconds < 0.0:
            return
        self._count_surprise(seconds, self.move_seconds(num_blocks))
        self._moves.append((num_blocks, seconds))
        self._line = None
        if len(self._surprises) >= MIN_MEASUREMENTS:
            recent = list(self._moves)[-MIN_MEASUREMENTS:]
            self._moves.clear()
            self._moves.extend(recent)
            self._surprises.clear()

    def observe_idle_eviction(self) -> None:
        """An idle block went to the host, where it may be used again or not."""
        self._fade_idle(1)
        self._num_idle_unused += 1.0

    def observe_idle_hit(self) -> None:
        """One of the idle blocks that went to the host was used again."""
        self._num_idle_unused = max(0.0, self._num_idle_unused - 1.0)
        self._num_idle_hits += 1.0

    def move_seconds(self, num_blocks: int) -> float:
        """What moving so many blocks one way is expected to take."""
        if len(self._moves) < MIN_MEASUREMENTS:
            return 0.0
        if self._line is None:
            self._line = _fitted_line(self._moves)
        fixed, per_block = self._line
        return fixed + per_block * num_blocks

    def is_offload_cheaper(
        self, num_blocks: int, num_tokens: int, seconds_per_token: float, reuse: float = 1.0
    ) -> bool:
        """Whether to move the blocks out now, rather than to recompute `num_tokens` later.

        `reuse` is the chance that they are wanted again: 1 for a preempted sequence,
        `idle_reuse` for a finished conversation. To ask is to decide: the answer is counted.
        """
        move = self.move_seconds(num_blocks)
        offload = move + reuse * move
        recompute = reuse * num_tokens * seconds_per_token
        self._probe_budget_s += PROBE_SHARE * min(offload, recompute)
        self.is_probing = False
        if offload < recompute:
            return True
        if self._is_probe_affordable(offload - recompute) and recompute > 0.0:
            self._probe_budget_s -= offload - recompute
            self.is_probing = True
            return True
        self._num_refusals += 1
        if reuse < 1.0:
            # What is not offloaded cannot come back, so what led here fades by itself.
            self._fade_idle(num_blocks)
        return False

    def _count_surprise(self, seconds: float, expected: float) -> None:
        is_slow, is_fast = seconds > SURPRISE_RATIO * expected, SURPRISE_RATIO * seconds < expected
        if len(self._moves) < MIN_MEASUREMENTS or not (is_slow or is_fast):
            self._surprises.clear()
        elif self._surprises and self._surprises[-1] != is_slow:
            self._surprises = [is_slow]
        else:
            self._surprises.append(is_slow)
        if not is_fast:
            self._num_refusals = 0

    def _is_probe_affordable(self, extra_s: float) -> bool:
        return self._num_refusals >= REFUSALS_BEFORE_PROBE and extra_s <= self._probe_budget_s

    def _fade_idle(self, num_blocks: int) -> None:
        factor = (1.0 - 1.0 / IDLE_MEMORY) ** num_blocks
        self._num_idle_hits *= factor
        self._num_idle_unused *= factor


def _fitted_line(moves: "deque[tuple[int, float]]") -> tuple[float, float]:
    """Seconds as (fixed part, part per block); neither is negative."""
    by_size = sorted(moves)
    half = len(by_size) // 2
    slopes = [
        (more_s - fewer_s) / (more - fewer)
        for (fewer, fewer_s), (more, more_s) in zip(by_size[:half], by_size[-half:], strict=True)
        if more != fewer
    ]
    if len(slopes) >= MIN_SLOPES and (per_block := median(slopes)) > 0.0:
        fixed = median(seconds - per_block * num_blocks for num_blocks, seconds in moves)
        if fixed >= 0.0:
            return fixed, per_block
    return 0.0, median(seconds / num_blocks for num_blocks, seconds in moves)
