"""Bodies to requests: pure, so any body may be tried."""

import math
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.protocol.accepted_request import (
    Order,
    build_request,
    cache_scope,
    check_early,
    reserve,
)
from control.protocol.chat_request import ChatRequest
from control.protocol.completion_request import CompletionRequest
from control.protocol.json_body import parse_object
from control.registry.model_version import ModelVersion
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import PriorityClass

VOCAB = 300
VERSION = ModelVersion("m", "v1", "ab" * 32, "/w", 100, 50, datetime(2030, 1, 1, tzinfo=UTC), True)
ORDER = Order(
    request_id="0" * 26,
    tenant_id="tnt",
    key_id="key",
    endpoint="/v1/completions",
    priority_class=PriorityClass.INTERACTIVE,
    minted_seed=99,
    arrival=10.0,
    deadline_at=20.0,
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
LEGACY = {"model": "m", "prompt": "x"}
CODES = {
    "invalid_value",
    "unsupported_parameter",
    "missing_required_parameter",
    "context_length_exceeded",
}

any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
fields_of_both = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})


@given(st.binary())
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        outcome: object = parse_object(body)
    except InvalidRequest as error:
        outcome = (error.code, error.param)
    assert isinstance(outcome, dict) or outcome in (("invalid_json", ""), ("invalid_value", ""))


@given(st.dictionaries(st.sampled_from(fields_of_both) | st.text(), any_json, max_size=4))
@pytest.mark.parametrize(("kind", "base"), [(ChatRequest, CHAT), (CompletionRequest, LEGACY)])
def test_any_fields_become_a_lawful_request_or_are_refused_by_name(
    kind: type[ChatRequest] | type[CompletionRequest],
    base: dict[str, object],
    fields: dict[str, object],
) -> None:
    try:
        parsed = kind.parse({**base, **fields})
        check_early(parsed, VERSION, VOCAB)
        request = build_request(parsed, [[1, 2, 3]], VERSION, VOCAB, ORDER)
    except InvalidRequest as error:
        refusal = error
    else:
        request.validate(VOCAB, VERSION.max_model_len)
        assert math.isfinite(request.sampling.temperature)
        assert msgspec.msgpack.encode(request)
        return
    assert 0 < len(refusal.param) <= 64
    assert refusal.param.isascii()
    assert refusal.param.isprintable()
    assert refusal.code in CODES


def test_the_reservation_holds_prompts_once_and_every_choice_in_full() -> None:
    fields = CompletionRequest.parse({**LEGACY, "n": 3, "max_tokens": 10, "metadata": {"a": "b"}})
    request = build_request(fields, [[1] * 5, [2] * 7], VERSION, VOCAB, ORDER)
    reservation = reserve(fields, request, VERSION, ORDER)
    assert reservation.prompt_tokens == 12
    assert reservation.reserved_tokens == 12 + 2 * 3 * 10
    assert reservation.metadata == {"a": "b"}
    assert (reservation.model, reservation.version) == ("m", "v1")


def test_a_seed_is_minted_only_when_there_is_none() -> None:
    for fields, seed in (({}, 99), ({"seed": None}, 99), ({"seed": 0}, 0), ({"seed": 5}, 5)):
        parsed = CompletionRequest.parse({**LEGACY, **fields})
        assert build_request(parsed, [[1]], VERSION, VOCAB, ORDER).sampling.seed == seed


def test_scopes_differ_by_tenant_and_by_weights() -> None:
    scopes = {cache_scope(t, d) for t in ("a", "b", "ab") for d in ("1" * 64, "b" * 64)}
    assert len(scopes) == 6


@pytest.mark.parametrize(("top_k", "kept"), [(None, 0), (-1, 0), (0, 0), (1, 1), (10**9, VOCAB)])
def test_top_k_has_one_meaning_for_off_and_for_all(top_k: int | None, kept: int) -> None:
    fields = CompletionRequest.parse({**LEGACY, "top_k": top_k})
    assert fields.sampling(5, 0, VOCAB).top_k == kept


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("value", [-0.0, 5e-324, -5e-324])
def test_no_field_accepts_a_negative_zero_or_a_subnormal_number(
    kind: type[ChatRequest] | type[CompletionRequest], value: float
) -> None:
    base = CHAT if kind is ChatRequest else LEGACY
    for name in kind.model_fields:
        with pytest.raises(InvalidRequest) as caught:
            kind.parse({**base, name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_a_penalty_that_changes_nothing_is_accepted(name: str, value: float | None) -> None:
    CompletionRequest.parse({**LEGACY, name: value})


def test_limits_are_named_as_the_caller_named_them() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        fields = ChatRequest.parse({**CHAT, name: 0})
        with pytest.raises(InvalidRequest, match=f"^{name} must be at least 1") as caught:
            check_early(fields, VERSION, VOCAB)
        assert caught.value.param == name


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = ChatRequest.parse({"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert parsed.messages[0].text == "ab"
