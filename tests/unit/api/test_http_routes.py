"""Routes beside those that generate, and what all routes have in common."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.generation import Generation, GenerationSettings
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import MODEL, FakeEngineClient, ids_of
from tests.fakes.frontend import http_client, make_serving


async def test_models_version_health_and_tokenizer_routes() -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        models = (await http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert models["data"][0]["id"] == MODEL
        assert models["data"][0]["owned_by"] == "pagewire"
        assert (await http.get(f"/v1/models/{MODEL}")).json() == models["data"][0]
        assert (await http.get("/v1/models/other/name")).status_code == 404
        assert (await http.get("/version")).json()["version"]
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/health/live")).status_code == 200
        tokens = (await http.post("/tokenize", json={"prompt": "hi"})).json()
        assert tokens["tokens"] == ids_of("hi")
        assert (tokens["count"], tokens["token_strs"]) == (2, ["h", "i"])
        text = (await http.post("/detokenize", json={"tokens": ids_of("hi")})).json()
        assert text == {"prompt": "hi"}
        told = (await http.get("/tokenizer_info")).json()
        assert told["eos_token"] == "<|im_end|>"
        assert "<|im_start|>" in told["chat_template"]
    async with http_client(await make_serving(FakeEngineClient(chat_template=None))) as http:
        assert "chat_template" not in (await http.get("/tokenizer_info")).json()


@pytest.mark.parametrize("parse", [True, False])
async def test_a_prompt_is_tokenised_as_a_completion_reads_it(parse: bool) -> None:
    serving = Serving(FrontendConfig())
    settings = GenerationSettings(parse_control_tokens_in_prompts=parse)
    serving.connect(await Generation.create(FakeEngineClient(), settings))
    async with http_client(serving) as http:
        told = (await http.post("/tokenize", json={"prompt": "a<|im_end|>"})).json()
        body = {"prompt": "a<|im_end|>", "return_token_ids": True}
        completion = (await http.post("/v1/completions", json=body)).json()
    assert told["tokens"] == completion["choices"][0]["prompt_token_ids"]
    assert (told["count"] == 2) is parse


async def test_messages_are_tokenised_as_a_chat_would_be() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name }}{{ mood }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "h<|im_end|>"}], "tools": [tool]}
    body |= {"chat_template_kwargs": {"mood": "!"}}
    async with http_client(await make_serving(FakeEngineClient(chat_template=template))) as http:
        told = (await http.post("/tokenize", json=body)).json()
        chat = await http.post(
            "/v1/chat/completions", json=body | {"return_token_ids": True, "tool_choice": "none"}
        )
        assert told["tokens"] == chat.json()["prompt_token_ids"]
        assert "".join(told["token_strs"]) == "h<|im_end|>f!>"
        assert told["count"] == 14, "the control token is text there"
        plain = (await http.post("/tokenize", json=body | {"add_generation_prompt": False})).json()
        assert plain["tokens"] == told["tokens"][:-1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools[0]"),
    ],
)
async def test_what_can_t_be_tokenised_is_refused_by_field(
    body: dict[str, Any], field: str
) -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        response = await http.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
async def test_routing_errors_have_openais_shape(method: str, path: str, status: int) -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_request_id_is_echoed_or_given() -> None:
    client = FakeEngineClient()
    async with http_client(await make_serving(client)) as http:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        response = await http.post(
            "/v1/chat/completions", json=body, headers={"X-Request-Id": "my-id-1"}
        )
        assert response.headers["x-request-id"] == "my-id-1"
        assert response.json()["id"] == "chatcmpl-my-id-1"
        assert client.requests[0].request_id.startswith("my-id-1")
        unusable = await http.get("/health", headers={"X-Request-Id": "a b\tc"})
        assert len(unusable.headers["x-request-id"]) == 32


async def test_openapi_describes_the_bodies() -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        document = (await http.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert "messages" in document["components"]["schemas"][name]["properties"]


async def test_openapi_describes_what_a_query_may_say() -> None:
    async with http_client(await make_serving(FakeEngineClient())) as http:
        document = (await http.get("/openapi.json")).json()
    listed = document["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    places = {parameter["name"]: parameter["in"] for parameter in listed}
    assert places == {"response_id": "path", "limit": "query", "order": "query", "after": "query"}


async def test_a_key_names_the_tenant_without_being_told_to_the_engine() -> None:
    client = FakeEngineClient()
    async with http_client(await make_serving(client)) as http:
        for key in ("Bearer sk-one", "bearer  sk-one ", "Bearer sk-two", "Basic sk-one", ""):
            for path, body in (
                ("/v1/completions", {"prompt": "ab"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                response = await http.post(path, json=body, headers={"authorization": key})
                assert response.status_code == 200, response.text
    one, same, other, basic, none = (request.tenant for request in client.requests[::2])
    assert [request.tenant for request in client.requests[1::2]] == [one, same, other, basic, none]
    assert one == same != other
    assert basic == none == ""
    assert "sk" not in one
