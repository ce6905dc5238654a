"""Outputs of a given form, from the official SDK to a real model and back.

Gateway, dispatcher and replica are real; the model is tiny and random and would say anything, so
whatever is valid is the grammar's doing.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from benchmarks.random_schemas import random_schema
from control.identity.keys import create_key
from control.protocol.accepted_request import Order
from control.registry.manifest import write_manifest
from engine.interface.errors import InvalidRequest
from engine.interface.generation_request import GenerationRequest, PriorityClass
from engine.interface.grammar import Grammar
from tests.api.live_gateway import PEPPER, gateway_settings, live_gateway
from tests.engine.grammar.small_model import write_small_model
from tests.workers.service import Service
from workers.batch_requests import LineRequests

TEMPLATE = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


class Size(BaseModel, extra="forbid"):
    """A part of a thing."""

    width: int = Field(ge=0, le=999)
    unit: Literal["cm", "inch"]


class Thing(BaseModel, extra="forbid"):
    """What is asked for."""

    name: str = Field(pattern="^[a-z]{2,8}$")
    sizes: list[Size] = Field(max_length=2)
    note: Literal["größer", "kleiner"] | None


@pytest.fixture(scope="module")
def service(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("model")
    write_small_model(folder, TEMPLATE)
    write_manifest(folder)
    service = Service(database_url, redis_url, folder, folder)
    service.start_dispatcher()
    service.start_replica()
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: Service, database_url: str, redis_url: str) -> Iterator[openai.OpenAI]:
    with service.database.begin() as connection:
        scopes = frozenset({"inference"})
        _, key = create_key(connection, PEPPER, service.tenant.tenant_id, scopes)
    with (
        live_gateway(gateway_settings(database_url, redis_url)) as gateway,
        openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0, timeout=30) as client,
    ):
        yield client


def test_the_sdk_parses_answers_streamed_and_not(client: openai.OpenAI, service: Service) -> None:
    for seed in range(2):
        wish: Any = {
            "model": service.model,
            "messages": MESSAGES,
            "response_format": Thing,
            "seed": seed,
        }
        whole = client.chat.completions.parse(**wish).choices[0].message
        assert isinstance(whole.parsed, Thing)
        with client.chat.completions.stream(**wish) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.parsed == whole.parsed


def test_what_the_limit_cuts_is_not_taken_for_an_answer(
    client: openai.OpenAI, service: Service
) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=service.model, messages=MESSAGES, response_format=Thing, max_tokens=6
        )


def test_whatever_stops_is_valid_by_its_schema(client: openai.OpenAI, service: Service) -> None:
    random = Random(7)
    num_valid = 0
    for seed in range(8):
        schema = random_schema(random)
        answer = client.chat.completions.create(
            model=service.model,
            messages=MESSAGES,
            max_tokens=120,
            seed=seed,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "record", "schema": schema},
            },
        ).choices[0]
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content or ""), schema)
            num_valid += 1
        else:
            assert answer.finish_reason == "length"
    assert num_valid >= 2


def test_raw_prompts_and_choices(client: openai.OpenAI, service: Service) -> None:
    answer = client.completions.create(
        model=service.model,
        prompt=["one", "two"],
        n=2,
        max_tokens=40,
        extra_body={"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    )
    assert len(answer.choices) == 4
    assert {choice.text for choice in answer.choices} <= {"yes", "no", "perhaps"}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


async def test_a_line_of_a_batch_means_the_same(service: Service) -> None:
    lines = LineRequests()
    order = Order(
        request_id="0" * 26,
        tenant_id="t",
        key_id="k",
        endpoint="/v1/chat/completions",
        priority_class=PriorityClass.BATCH,
        minted_seed=1,
        arrival=0.0,
        deadline_at=60.0,
    )

    async def build(schema: object) -> GenerationRequest:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        body = {"model": service.model, "messages": MESSAGES, "response_format": form}
        now = datetime.now(UTC)
        request, _ = await lines.build(json.dumps(body).encode(), service.version, order, now)
        return request

    try:
        good = await build({"type": "integer"})
        assert good.sampling.grammar == Grammar.json_schema({"type": "integer"})
        with pytest.raises(InvalidRequest, match="objekt") as refusal:
            await build({"type": "objekt"})
        assert refusal.value.param == "response_format.json_schema.schema"
    finally:
        lines.close()
