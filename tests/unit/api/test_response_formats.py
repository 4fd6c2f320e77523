"""`response_format` and vLLM's names for a constraint: what they ask the engine for, and by which
name they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import StructuredOutput
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import http_client, make_serving

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}'
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
BOTH = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA} | fields}


@BOTH
@pytest.mark.parametrize(
    ("asked", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            StructuredOutput(json_schema=SCHEMA_TEXT),
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            StructuredOutput(json_object=True),
        ),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            StructuredOutput(json_object=True),
        ),
        ({"response_format": json_schema()}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"response_format": json_schema(strict=True)}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        (
            {"response_format": json_schema(strict=False, description="an x")},
            StructuredOutput(json_schema=SCHEMA_TEXT, lenient=True),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutput(json_schema="{}")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": "root ::= x"}}, StructuredOutput(grammar="root ::= x")),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"guided_json": SCHEMA_TEXT}, StructuredOutput(json_schema=SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a"]}, StructuredOutput(choice=("a",))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            StructuredOutput(regex="a"),
        ),
    ],
)
async def test_the_engine_is_asked_for_what_the_client_names(
    path: str, body: dict[str, Any], asked: dict[str, Any], constraint: StructuredOutput | None
) -> None:
    client = FakeEngineClient()
    async with http_client(await make_serving(client)) as http:
        answer = await http.post(path, json=body | asked)
    assert answer.status_code == 200
    assert client.requests[0].sampling_params.structured_output == constraint


@BOTH
@pytest.mark.parametrize("asked", [{"response_format": json_schema()}, {"guided_regex": "a+"}])
async def test_a_client_may_let_max_tokens_cut(
    path: str, body: dict[str, Any], asked: dict[str, Any]
) -> None:
    client = FakeEngineClient()
    async with http_client(await make_serving(client)) as http:
        for more in ({}, {"fit_max_tokens": False}, {"fit_max_tokens": True}):
            answer = await http.post(path, json=body | asked | more)
            assert answer.status_code == 200
    told = [request.sampling_params.structured_output for request in client.requests]
    assert [each and each.fit_max_tokens for each in told] == [True, False, True]


@BOTH
@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format.type", {"response_format": {}}),
        ("response_format.type", {"response_format": {"type": "structural_tag"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.schema",
            {"response_format": {"type": "json_object", "schema": "{}"}},
        ),
        (
            "response_format.schema",
            {"response_format": {"type": "json_object", "schema": {"const": "x" * 300_000}}},
        ),
        ("response_format.json_schema.name", {"response_format": json_schema(name=None)}),
        ("response_format.json_schema.name", {"response_format": json_schema(name="a b")}),
        ("response_format.json_schema.strict", {"response_format": json_schema(strict="yes")}),
        ("response_format.json_schema.schema", {"response_format": json_schema(schema=None)}),
        ("response_format.json_schema.schema", {"response_format": json_schema(schema=[])}),
        (
            "response_format.json_schema.schema",
            {"response_format": json_schema(schema={"const": "x" * 300_000})},
        ),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("structured_outputs.json", {"structured_outputs": {"json": 5}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": "a"}}),
        ("structured_outputs.json_object", {"structured_outputs": {"json_object": 1}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice", {"guided_choice": ["a"] * 5000}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_regex", {"response_format": json_schema(), "guided_regex": "a"}),
        ("guided_regex", {"guided_regex": "a", "structured_outputs": {"json": {}}}),
        ("response_format", {"response_format": json_schema(), "n": 2, "use_beam_search": True}),
        ("fit_max_tokens", {"fit_max_tokens": True}),
    ],
)
async def test_a_constraint_that_can_not_be_served_is_a_400_that_names_it(
    path: str, body: dict[str, Any], param: str, asked: dict[str, Any]
) -> None:
    client = FakeEngineClient()
    async with http_client(await make_serving(client)) as http:
        answer = await http.post(path, json=body | asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not client.requests


@BOTH
@pytest.mark.parametrize(
    ("name", "says"), [(None, "is required: 1 to 64"), ("a b", "must be 1 to 64")]
)
async def test_a_wrong_name_is_told_from_none(
    path: str, body: dict[str, Any], name: str | None, says: str
) -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        answer = await http.post(path, json=body | {"response_format": json_schema(name=name)})
    assert says in answer.json()["error"]["message"]


@BOTH
async def test_what_the_engine_refuses_is_named_as_the_client_knows_it(
    path: str, body: dict[str, Any]
) -> None:
    client = FakeEngineClient(
        fail_after=0,
        failure=InvalidArgumentError("structured_output.json_schema", "Invalid type: strin"),
    )
    async with http_client(await make_serving(client)) as http:
        answer = await http.post(path, json=body | {"response_format": json_schema()})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
