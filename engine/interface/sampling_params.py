"""How a caller wants the next token chosen.

Values only; `validate` states the law every front end and the engine itself hold them to.
"""

import math
from dataclasses import dataclass

from engine.interface.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 8
MAX_SEED = 2**63 - 1

# Below this the softmax of real logits is one-hot, so the row is computed as an argmax
# and no division can overflow.
GREEDY_TEMPERATURE = 1e-3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; every choice of the request shares them.

    `top_k` 0 means no limit, a `top_p` of 0 keeps the most likely token alone. `seed` keys the
    counter-based noise together with the choice index and the token position, so equal seeds
    give equal tokens in any schedule.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        """True when every token is the argmax of its logits."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field outside its range."""
        _require(1 <= self.max_tokens < 2**31, "max_tokens", "must be at least 1")
        _require(_in_range(self.temperature, 0.0, 2.0), "temperature", "must be in [0, 2]")
        _require(_in_range(self.top_p, 0.0, 1.0), "top_p", "must be in [0, 1]")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        _require(_in_range(self.min_p, 0.0, 1.0), "min_p", "must be in [0, 1]")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be between 0 and the output limit",
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"takes at most {MAX_STOP_STRINGS}")
        for stop in self.stop:
            _require(
                0 < len(stop.encode()) <= MAX_STOP_BYTES,
                "stop",
                f"strings must be 1 to {MAX_STOP_BYTES} bytes long",
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"takes at most {MAX_STOP_TOKEN_IDS}",
        )
        _require(
            all(0 <= token_id < vocab_size for token_id in self.stop_token_ids),
            "stop_token_ids",
            f"must lie in [0, {vocab_size})",
        )
        _require(0 <= self.seed <= MAX_SEED, "seed", f"must be in [0, {MAX_SEED}]")
        _require(1 <= self.n <= MAX_CHOICES, "n", f"must be in [1, {MAX_CHOICES}]")


def _in_range(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(holds: bool, param: str, law: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {law}.", param=param)
