"""Constraints on outputs through the servers' doors, with a real model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from pydantic import BaseModel

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.e2e.serve_process import MODEL, Served

ASK: list[Any] = [{"role": "user", "content": "Describe the city of Paris as JSON."}]


class City(BaseModel):
    name: str
    population: int
    capital: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "kind": {"enum": ["city", "village"]},
    },
    "required": ["name", "population", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def response_format(schema: dict[str, Any], **fields: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema} | fields}


def test_a_json_schema_is_kept_streamed_and_whole(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "response_format": response_format(SCHEMA, strict=True),
        "max_tokens": 120,
    }
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 3}):
        whole = create(**asked, **sampling).choices[0]
        chunks = list(create(**asked, **sampling, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.message.content
        assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)


def test_the_clients_own_parser_gets_its_model(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, temperature=0, max_tokens=200
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)


def test_several_answers_to_one_prompt_keep_to_the_schema_each(client: openai.OpenAI) -> None:
    answers = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format=response_format(SCHEMA),
        n=3,
        temperature=2.0,
        seed=1,
        max_tokens=120,
    )
    texts = {choice.message.content or "" for choice in answers.choices}
    assert len(texts) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_any_json_object(client: openai.OpenAI) -> None:
    question = "What is the capital of France? Answer as JSON."
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"choice": ["rot", "grün", "🙂 blau"]}}, "rot|grün|🙂 blau"),
        ({"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}, "[0-9]{4}-[0-9]{2}"),
        ({"guided_grammar": 'root ::= "x" ("," "x"){2,3}'}, "x(,x){2,3}"),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}}, "<[a-z]{1,5}>"),
    ],
)
def test_vllm_s_names_on_completions(
    client: openai.OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Say", max_tokens=40, temperature=1.0, seed=2, extra_body=asked
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.text)


def test_a_stop_string_still_cuts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Say",
        stop=["34"],
        extra_body={"guided_regex": "x12345"},
        max_tokens=20,
    ).choices[0]
    assert (answer.text, answer.finish_reason) == ("x12", "stop")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "integer", "not": {"multipleOf": 2}}, "not of"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "http://example.com/schema.json"}, "example.com"),
    ],
)
def test_a_schema_that_can_not_be_kept_is_a_400_that_says_why(
    client: openai.OpenAI, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, response_format=response_format(schema)
        )
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_lenient_schema_is_kept_as_far_as_it_can_be(client: openai.OpenAI) -> None:
    schema = SCHEMA | {"unevaluatedItems": False}
    choice = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_format=response_format(schema, strict=False),
        temperature=0,
        max_tokens=120,
    ).choices[0]
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_grpc_takes_constraints_and_names_what_is_wrong_with_one(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    def request(constraint: sampling_pb2.StructuredOutput) -> inference_pb2.GenerateRequest:
        params = sampling_pb2.SamplingParams(max_tokens=30, structured_output=constraint)
        return inference_pb2.GenerateRequest(text="Say", sampling_params=params)

    right = sampling_pb2.StructuredOutput(regex="(ab){3,5}!")
    texts = [part.outputs[0].text for part in stub.Generate(request(right), timeout=60)]
    assert re.fullmatch("(ab){3,5}!", "".join(texts))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateUnary(request(sampling_pb2.StructuredOutput(regex="a(")), timeout=60)
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]  # it is a call too
    assert status is not None
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    detail = error_details_pb2.BadRequest()
    status.details[0].Unpack(detail)
    assert detail.field_violations[0].field == "sampling_params.structured_output.regex"
