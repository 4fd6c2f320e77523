"""API keys and limits: each route but health asks for a key, over both APIs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.errors import ResourceExhaustedError, UnauthenticatedError
from pagewire.logs import JsonFormatter
from pagewire.settings import SettingsError
from pagewire.v1 import engine_pb2, inference_pb2, operations_pb2_grpc
from pagewire_frontend.api_keys import ApiKeys
from pagewire_frontend.request_limits import RequestLimits
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import (
    chat_request,
    grpc_stub,
    http_client,
    make_serving,
    running_frontend,
)

KEY = {"authorization": "Bearer k-1"}
TEXT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(await make_serving(FakeEngineClient(), **config)) as http:
        yield http


async def test_every_route_but_health_asks_for_a_key() -> None:
    async with served(api_key="k-1,k-2") as http:
        document = (await http.get("/openapi.json", headers=KEY)).json()
        answers = {}
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await http.request(method, path.replace("{", "").replace("}", ""))
                answers[path] = answer.status_code
        answers["/openapi.json"] = (await http.get("/openapi.json")).status_code
        answers["/nowhere"] = (await http.get("/nowhere")).status_code
    opened = {path for path, status in answers.items() if status != 401}
    assert opened == {"/health", "/health/live", "/ping"} & answers.keys()
    assert "/metrics" in answers
    assert "/tokenize" in answers


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer k-3", "Basic k-1", "k-1", "Bearer k-1,k-2", "Bearer K-1",
     "Bearer \xe9", "Bearer k-1 k-1"],
)  # fmt: skip
async def test_what_is_no_key_of_ours_is_refused(authorization: str) -> None:
    async with served(api_key="k-1,k-2") as http:
        answer = await http.post(
            "/v1/chat/completions",
            json=CHAT,
            headers={"authorization": authorization.encode("latin-1")},  # type: ignore[dict-item]
        )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert "k-1" not in error["message"]


@pytest.mark.parametrize("key", ["k-1", "k-2", "  k-2  "])
async def test_each_of_several_keys_lets_in(key: str) -> None:
    async with served(api_key="k-1,k-2") as http:
        headers = {"Authorization": f"bearer {key}"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_metrics_have_a_switch_of_their_own() -> None:
    async with served(api_key="k-1", open_metrics=True) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


async def test_grpc_asks_for_a_key_too() -> None:
    async with running_frontend(FakeEngineClient(), api_key="k-1") as server:
        target = f"127.0.0.1:{server.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel, grpc_stub(server) as stub:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(inference_pb2.ListModelsRequest())
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Chat(chat_request(), metadata=[("authorization", "Bearer x")]):
                    pass
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            listing = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in reflection.ServerReflectionInfo(iter([listing])):
                    pass
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            watch = operations_pb2_grpc.ObservabilityStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in watch.WatchStats(engine_pb2.GetStatsRequest()):
                    pass
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            key = tuple(KEY.items())
            assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=key)).models
            async for _ in reflection.ServerReflectionInfo(iter([listing]), metadata=key):
                pass


async def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nk-1 team-a\nk-2\tteam-a\n\n  k-3\n")
    client = FakeEngineClient()
    async with http_client(await make_serving(client, api_key_file=str(file))) as http:
        for key in ("k-1", "k-2", "k-3"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
    tenants = [request.tenant for request in client.requests]
    assert tenants[:2] == ["team-a", "team-a"]
    assert len(tenants[2]) == 16
    assert "k-3" not in tenants[2]


def test_a_changed_file_of_keys_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire_frontend.api_keys._LOOK_INTERVAL_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = ApiKeys(["given"], file)
    assert keys.tenant("Bearer old")
    file.write_text("brand-new team\n")
    assert keys.tenant("Bearer brand-new") == "team"
    with pytest.raises(UnauthenticatedError):
        keys.tenant("Bearer old")
    assert keys.tenant("Bearer given")
    # What can't be read leaves everybody their keys.
    file.write_text("one two three\n")
    assert keys.tenant("Bearer brand-new") == "team"
    os.remove(file)
    assert keys.tenant("Bearer brand-new") == "team"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [(b"", "holds no key"), (b"a b c", "line 1"), (b"k a\nk b\n", "line 2"), (b"\xff\xfe", "UTF-8"),
     ("k\xe9\n".encode(), "ASCII"), (None, "can't read")],
)  # fmt: skip
def test_a_file_that_holds_no_keys_is_refused(
    tmp_path: Path, content: bytes | None, wrong: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=wrong):
        ApiKeys(file=file)


@pytest.mark.parametrize("keys", [[""], ["a", ""], ["a b"], ["é"], ["a\n"]])
def test_a_setting_that_is_no_key_is_refused(keys: list[str]) -> None:
    with pytest.raises(SettingsError, match="--api-key"):
        ApiKeys(keys)


def test_a_tenant_gets_so_many_requests_a_minute() -> None:
    now = [100.0]
    limits = RequestLimits(per_minute=3, clock=lambda: now[0])
    for _ in range(3):
        limits.enter("a")
    with pytest.raises(ResourceExhaustedError) as refused:
        limits.enter("a")
    assert refused.value.retry_after_s == pytest.approx(20.0)
    limits.enter("b")  # another one's are not touched
    now[0] += 19.9
    with pytest.raises(ResourceExhaustedError):
        limits.enter("a")
    now[0] += 0.1
    limits.enter("a")
    now[0] += 1000.0
    for _ in range(3):
        limits.enter("a")
    with pytest.raises(ResourceExhaustedError):
        limits.enter("a")


def test_what_was_refused_does_not_count() -> None:
    limits = RequestLimits(concurrent=1)
    limits.enter("a")
    for _ in range(5):
        with pytest.raises(ResourceExhaustedError):
            limits.enter("a")
    limits.leave("a")
    limits.enter("a")


async def test_http_says_when_to_come_again() -> None:
    async with served(max_requests_per_minute=2) as http:
        # Keys that nobody checks make no tenants.
        for name in ("x", "y"):
            headers = {"authorization": f"Bearer {name}"}
            assert (await http.post("/tokenize", json=TEXT, headers=headers)).status_code == 200
        answer = await http.post("/tokenize", json=TEXT)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for path in ("/health", "/metrics", "/v1/models", "/version", "/tokenizer_info"):
            assert (await http.get(path)).status_code == 200


async def test_a_page_that_watches_takes_nothing_of_its_users_requests() -> None:
    client = FakeEngineClient()
    config: dict[str, Any] = {
        "max_requests_per_minute": 1,
        "max_concurrent_requests": 1,
        "allow_watch_stats": True,
        "allow_runtime_lora_updating": True,
    }
    async with running_frontend(client, **config) as server:
        target = f"127.0.0.1:{server.grpc_port}"
        async with grpc_stub(server) as stub, grpc.aio.insecure_channel(target) as channel:
            watch = operations_pb2_grpc.ObservabilityStub(channel)
            watching = watch.WatchStats(engine_pb2.GetStatsRequest(interval_ms=100))
            await watching.read()
            for _ in range(3):
                await stub.ListModels(inference_pb2.ListModelsRequest())
                await stub.ListChatTemplates(inference_pb2.ListChatTemplatesRequest())
                await watch.WatchStats(engine_pb2.GetStatsRequest()).read()
            await stub.ChatUnary(chat_request())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ChatUnary(chat_request())
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            watching.cancel()


async def test_places_come_back_however_a_request_ends() -> None:
    client = FakeEngineClient(hang_after=1)
    async with running_frontend(client, max_concurrent_requests=1) as server:
        async with grpc_stub(server) as stub:
            for _ in range(3):
                call = stub.Chat(chat_request())
                await call.read()
                assert await tokenize_status(server) == 429
                call.cancel()
                await until_free(server)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ChatUnary(inference_pb2.ChatRequest())
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            await until_free(server)
            call = stub.Chat(chat_request())
            await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()
        await until_free(server)
        base = f"http://127.0.0.1:{server.http_port}"
        body = {**CHAT, "stream": True}
        async with (
            httpx.AsyncClient(base_url=base, timeout=60) as http,
            http.stream("POST", "/v1/chat/completions", json=body),
        ):
            assert await tokenize_status(server) == 429
        await until_free(server)


async def tokenize_status(server: FrontendServer) -> int:
    async with httpx.AsyncClient(
        verify=False, timeout=60
    ) as http:  # certificates take long to read
        url = f"http://127.0.0.1:{server.http_port}/tokenize"
        return (await http.post(url, json=TEXT)).status_code


async def until_free(server: FrontendServer) -> None:
    async with asyncio.timeout(60):
        while await tokenize_status(server) != 200:  # noqa: ASYNC110  # seen from outside alone
            await asyncio.sleep(0.01)


async def test_pages_of_named_origins_may_call() -> None:
    origin = {"origin": "https://example.org"}
    async with served(api_key="k-1", cors_origin=("https://example.org",)) as http:
        preflight = await http.options(
            "/v1/chat/completions",
            headers={
                **origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://example.org"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        refused = await http.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://example.org"
        other = await http.get("/v1/models", headers={"origin": "https://evil.example", **KEY})
        assert "access-control-allow-origin" not in other.headers
    async with served() as http:
        answer = await http.get("/v1/models", headers=origin)
        assert "access-control-allow-origin" not in answer.headers


async def test_a_log_line_tells_all_of_a_request_but_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeEngineClient(reply=lambda *_: "an answer that is secret")
    serving = await make_serving(client, log_requests=True, api_key="k-1")
    with caplog.at_level(logging.INFO, "pagewire_frontend.requests"):
        async with http_client(serving) as http:
            answer = await http.post(
                "/v1/completions",
                json={"prompt": "a prompt that is secret", "user": "secret"},
                headers={**KEY, "x-request-id": "r-7"},
            )
    assert answer.headers["x-request-id"] == "r-7"
    (record,) = caplog.records
    text = JsonFormatter("pagewire-frontend").format(record)
    told = json.loads(text)
    assert told["request_id"] == "r-7"
    assert told["outcome"] == "ok"
    assert told["prompt_tokens"] == len("a prompt that is secret")
    assert told["service"] == "pagewire-frontend"
    assert told["tenant"]
    assert "secret" not in text
    assert "secret" not in record.getMessage()
