"""Bodies made to cost more than they look: they are refused by name, at once."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from pagewire_frontend.openai_api.app import create_app
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import make_serving

APP = create_app(asyncio.run(make_serving(FakeEngineClient(reply=lambda request, index: "ok"))))
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def post(path: str, body: Any) -> httpx.Response:
    return await post_bytes(path, json.dumps(body).encode())


async def post_bytes(path: str, content: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app=APP)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post(path, content=content, headers=headers)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [""] * 500_000}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 500_000}, "stop"),
        (
            "/v1/completions",
            {"prompt": "a", "logit_bias": dict.fromkeys(range(200_000), "x")},
            "logit_bias",
        ),
        ("/v1/chat/completions", {"messages": [1] * 500_000}, "messages"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [1] * 500_000, "tool_choice": "none"},
            "tools",
        ),
        ("/detokenize", {"tokens": [""] * 500_000}, "tokens"),
    ],
)
async def test_many_wrong_items_cost_no_more_than_one(
    path: str, body: dict[str, Any], field: str
) -> None:
    content = json.dumps(body).encode()
    started = time.process_time()
    json.loads(content)
    parsed = time.process_time()
    response = await post_bytes(path, content)
    answered = time.process_time()
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)
    assert answered - parsed < 10 * (parsed - started)  # an error for each takes 50 times


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "chat_template_kwargs": {"x": nested(600)}},
        {"messages": [{"role": "user", "content": "hi", "x": nested(600)}]},
        {**CHAT, "tools": [nested(600)], "tool_choice": "none"},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
                }
            ]
        },
    ],
    ids=["template variables", "message", "tools", "arguments"],
)
async def test_deep_nesting_is_no_fault_of_the_server(body: dict[str, Any]) -> None:
    """It is served where nothing looks into it, else refused."""
    response = await post("/v1/chat/completions", json.loads(json.dumps(body)))
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**31),
        ("top_k", 10**400),
        ("n", 10**400),
        ("stop", "a" * 1001),
        ("stop", ["b", "a" * 100_000]),
    ],
)
async def test_values_beyond_what_the_wire_or_the_search_takes_are_refused(
    field: str, value: Any
) -> None:
    response = await post("/v1/completions", {"prompt": "a", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await APP(scope, receive, send)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
