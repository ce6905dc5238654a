"""How a caller wants the next token chosen.

Values only; `validate` states the law every front end and the engine itself hold them to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.interface.errors import InvalidRequest
from engine.interface.grammar import Grammar
from engine.interface.token_logprobs import MAX_LOGPROBS

MAX_STOP_STRINGS = 4
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 8
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIASES = 300

# At or below this the softmax of real scores is one-hot, and so small a share of the mass is
# one token's: the row is computed as an argmax and no division can overflow.
NEARLY_ZERO = 1e-3
# Dividing by less could take a score out of the range of numbers.
MIN_REPETITION_PENALTY = 0.01

# What numbers may be, bounds included.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 2),
}
WHOLE_RANGES: Mapping[str, tuple[int, int]] = {
    "seed": (0, MAX_SEED),
    "n": (1, MAX_CHOICES),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; every choice of the request shares them.

    What happens to the model's scores, in this order:

    0. With a `grammar`, every token is impossible that would lead out of it. End tokens and
       stop tokens are impossible until the output is one of its words; after that, before
       `min_tokens` or with `ignore_eos`, as long as anything else is possible. One of them
       ends the output, always. (A stop token that is the only way on is text, and a stop.)
    1. `logit_bias` is added: (token id, -100 .. 100) pairs.
    2. `repetition_penalty` divides the positive and multiplies the negative scores of all
       tokens that stand in prompt or output. 1 is off.
    3. `frequency_penalty`, times how often the output holds a token, and `presence_penalty`,
       if it holds it at all, are subtracted. The prompt does not count.
    4. Before `min_tokens` output tokens every end token and stop token is impossible.
    5. A greedy row takes the largest score. It is greedy if `temperature` or `top_p` are
       nearly 0 or `top_k` is 1.
    6. The others divide by `temperature`; keep the `top_k` likeliest tokens (0 and -1: all,
       as is any number beyond the vocabulary); of these, renormalised, the fewest likeliest
       that make up `top_p`; of these, those at least `min_p` times as likely as the
       likeliest. Tokens as likely as the last one kept are kept too. One is drawn.

    `seed` keys the counter-based noise together with the choice index and the token position,
    so equal seeds give equal tokens in any schedule.

    `logprobs` asks for the logprob of every output token and of that many likeliest ones,
    `prompt_logprobs` for the same of every prompt token but the first, before which there is
    nothing; see `TokenLogprob`. With `prompt_logprobs`, and only then, `max_tokens` may be 0:
    the prompt is scored, and the output ends before it begins.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """True when every token is the argmax of its scores."""
        return min(self.temperature, self.top_p) <= NEARLY_ZERO or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True when a token's score depends on which tokens stand before it, as such."""
        return self.grammar is not None or self.is_penalised

    @property
    def is_penalised(self) -> bool:
        """True when tokens have other scores where they have been said before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is not what it must be."""
        self._check_length()
        _require(
            _is_int(self.top_k) and self.top_k >= -1, "top_k", "must be 0 or -1 (off), or more"
        )
        self._check_stops(vocab_size)
        for name, (low, high) in RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        for name, (least, most) in WHOLE_RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in ("logprobs", "prompt_logprobs"):
                _check_int(name, value, least, most)
        self._check_logit_bias(vocab_size)
        if self.grammar is not None:
            self.grammar.validate()

    def _check_length(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        _require(
            _is_int(self.max_tokens) and least <= self.max_tokens < 2**31,
            "max_tokens",
            f"must be at least {least}",
        )
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be between 0 and the output limit",
        )

    def _check_stops(self, vocab_size: int) -> None:
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
            all(_is_token(token_id, vocab_size) for token_id in self.stop_token_ids),
            "stop_token_ids",
            f"must lie in [0, {vocab_size})",
        )

    def _check_logit_bias(self, vocab_size: int) -> None:
        token_ids = [token_id for token_id, _ in self.logit_bias]
        _require(
            len(token_ids) <= MAX_LOGIT_BIASES, "logit_bias", f"takes at most {MAX_LOGIT_BIASES}"
        )
        _require(
            all(_is_token(token_id, vocab_size) for token_id in token_ids),
            "logit_bias",
            f"must name tokens in [0, {vocab_size})",
        )
        _require(len(set(token_ids)) == len(token_ids), "logit_bias", "must name a token once")
        for _, bias in self.logit_bias:
            _check_number("logit_bias", bias, -100, 100)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(token_id: int, vocab_size: int) -> bool:
    return _is_int(token_id) and 0 <= token_id < vocab_size


def _check_int(param: str, value: int, low: int, high: int) -> None:
    _require(_is_int(value) and low <= value <= high, param, f"must be in [{low}, {high}]")


def _check_number(param: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Nothing that is not finite lies between finite bounds.
    _require(is_number and low <= value <= high, param, f"must be in [{low}, {high}]")


def _require(holds: bool, param: str, law: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param} {law}.", param=param)
