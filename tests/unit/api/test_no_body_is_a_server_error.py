"""Whatever JSON a client sends, it is served or refused by name: never a 5xx."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire_frontend.openai_api.app import create_app
from pagewire_frontend.openai_api.requests import ChatBody, CompletionBody
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import make_serving

APP = create_app(asyncio.run(make_serving(FakeEngineClient(reply=lambda request, index: "ok"))))

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = ["role", "content", "type", "text", "name", "tool_calls", "function", "arguments"]
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(KEYS), VALUES | st.sampled_from(["user", "assistant", "text"])),
    max_size=3,
)
OTHERS = ["tools", "tool_choice", "response_format", "best_of", "functions", "unheard_of"]


def bodies(fields: list[str], required: dict[str, st.SearchStrategy[Any]]) -> Any:
    extra = st.dictionaries(st.sampled_from(fields), VALUES, max_size=4)
    return st.builds(lambda a, b: {**a, **b}, st.fixed_dictionaries(required), extra)


def post(path: str, body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = {"content-type": "application/json"}
            # Lone surrogates stay escapes, NaN stays NaN, as Python clients send them.
            return await http.post(path, content=json.dumps(body).encode(), headers=headers)

    return asyncio.run(send())


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    bodies(
        [*ChatBody.model_fields, *OTHERS],
        {"messages": MESSAGES | st.just([{"role": "user", "content": "hi"}])},
    )
)
def test_any_chat_body(body: dict[str, Any]) -> None:
    check(post("/v1/chat/completions", body))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(bodies([*CompletionBody.model_fields, *OTHERS], {"prompt": st.just("hi") | VALUES}))
def test_any_completion_body(body: dict[str, Any]) -> None:
    check(post("/v1/completions", body))
