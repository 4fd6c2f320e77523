"""The gRPC API over real sockets: streams, health, limits, and clients that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from pagewire.v1 import engine_pb2, inference_pb2, inference_pb2_grpc, operations_pb2_grpc
from pagewire_frontend.grpc_api.operations import MAX_WATCHERS
from pagewire_frontend.server import FrontendServer
from tests.fakes.fake_engine_client import CHATML, MODEL, FakeEngineClient, ids_of
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
async def server(engine: FakeEngineClient) -> AsyncIterator[FrontendServer]:
    async with running_frontend(engine, max_request_bytes=1 << 20) as server:
        yield server


@pytest.fixture
async def stub(server: FrontendServer) -> AsyncIterator[Any]:
    async with grpc_stub(server) as stub:
        yield stub


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """What a call, unary or streaming, fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if hasattr(call, "__aiter__") else call)
    return caught.value


async def read_all(call: Any, received: list[Any] | None = None) -> None:
    """Reads a stream to its end."""
    async for part in call:
        if received is not None:
            received.append(part)


def details_of(error: grpc.aio.AioRpcError) -> Any:
    """The details of its google.rpc.Status."""
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # it reads alike
    return status.details


async def test_streams_add_up_to_the_unary_answer(stub: Any) -> None:
    whole = await stub.ChatUnary(chat_request())
    assert whole.choices[0].content == "Hello, world!"
    parts = [part async for part in stub.Chat(chat_request())]
    assert "".join(part.choices[0].content for part in parts) == whole.choices[0].content
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 14
    request = inference_pb2.GenerateRequest(token_ids={"ids": ids_of("ab")})
    whole = await stub.GenerateUnary(request)
    parts = [part async for part in stub.Generate(request)]
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    assert whole.model == MODEL


async def test_both_loopbacks_answer_on_one_port(server: FrontendServer) -> None:
    for target in ("127.0.0.1", "[::1]", "localhost"):
        async with grpc.aio.insecure_channel(f"{target}:{server.grpc_port}") as channel:
            models = await inference_pb2_grpc.InferenceStub(channel).ListModels(
                inference_pb2.ListModelsRequest()
            )
        assert [model.id for model in models.models] == [MODEL]


async def test_every_address_of_the_machine_answers_where_asked_for() -> None:
    async with running_frontend(FakeEngineClient(), host="*") as server:
        for target in ("127.0.0.1", "[::1]"):
            async with grpc.aio.insecure_channel(f"{target}:{server.grpc_port}") as channel:
                models = await inference_pb2_grpc.InferenceStub(channel).ListModels(
                    inference_pb2.ListModelsRequest()
                )
            assert models.models[0].id == MODEL


async def test_a_long_name_is_quoted_in_part_and_the_error_is_the_server_s(stub: Any) -> None:
    request = inference_pb2.GenerateRequest(model="é" * 5000, text="hi")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_control_tokens_in_a_text_are_read_as_in_prompts_unless_the_request_says(
    engine: FakeEngineClient, parses: bool, asked: bool | None
) -> None:
    request = inference_pb2.TokenizeRequest(text="<s>", parse_special_tokens=asked)
    async with (
        running_frontend(engine, parse_control_tokens_in_prompts=parses) as server,
        grpc_stub(server) as stub,
    ):
        told = await stub.Tokenize(request)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            url = f"http://127.0.0.1:{server.http_port}/tokenize"
            over_http = (await http.post(url, json={"prompt": "<s>"})).json()
    as_control = parses if asked is None else asked
    assert list(told.tokens) == (["<s>"] if as_control else ["<", "s", ">"])
    if asked is None:
        assert over_http["tokens"] == list(told.token_ids)


async def test_tokens_and_text_there_and_back(stub: Any) -> None:
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="é<s>"))
    assert list(tokens.token_ids) == ids_of("é<s>")
    assert list(tokens.tokens) == ["\ufffd", "\ufffd", "<s>"]
    assert tokens.max_model_len == 2048
    plain = await stub.Tokenize(
        inference_pb2.TokenizeRequest(text="<s>", parse_special_tokens=False)
    )
    assert list(plain.tokens) == ["<", "s", ">"]
    text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "é<s>"
    rendered = await stub.RenderChat(
        inference_pb2.RenderChatRequest(messages=chat_request("hi").messages)
    )
    assert rendered.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(rendered.token_ids) == ids_of(rendered.prompt)


async def test_a_preview_tells_each_token_s_bytes_and_which_are_the_template_s_control_tokens(
    stub: Any,
) -> None:
    rendered = await stub.RenderChat(
        inference_pb2.RenderChatRequest(
            messages=chat_request("é <|im_end|>").messages, with_tokens=True
        )
    )
    assert b"".join(rendered.token_bytes).decode() == rendered.prompt
    assert len(rendered.token_bytes) == len(rendered.token_ids)
    control = [rendered.token_bytes[index] for index in rendered.control_positions]
    # What the client wrote is text.
    assert control == [b"<|im_start|>", b"<|im_end|>", b"<|im_start|>"]
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="é<s>", with_bytes=True))
    assert list(tokens.token_bytes) == [b"\xc3", b"\xa9", b"<s>"]
    assert list(tokens.control_positions) == [2]


async def test_templates_are_listed_and_a_fault_in_one_has_its_place(
    engine: FakeEngineClient,
) -> None:
    broken = inference_pb2.RenderChatRequest(
        messages=chat_request().messages,
        template_params={"chat_template": "{{ bos_token }}\n  {% if %}"},
    )
    listing = inference_pb2.ListChatTemplatesRequest()
    async with (
        running_frontend(engine, allow_request_chat_template=True) as server,
        grpc_stub(server) as stub,
    ):
        listed = await stub.ListChatTemplates(listing)
        assert [(t.name, t.source) for t in listed.templates] == [("default", CHATML)]
        assert listed.requests_may_bring_one
        error = await failure(stub.RenderChat(broken))
        place = inference_pb2.ChatTemplateFault()
        assert any(detail.Unpack(place) for detail in details_of(error))
        assert (place.line, place.column) == (2, 9)
    async with running_frontend(engine) as server, grpc_stub(server) as stub:
        assert not (await stub.ListChatTemplates(listing)).requests_may_bring_one
        error = await failure(stub.RenderChat(broken))
        assert "--allow-request-chat-template" in str(error.details())
        unknown = await failure(
            stub.ListChatTemplates(inference_pb2.ListChatTemplatesRequest(model="other"))
        )
        assert unknown.code() == grpc.StatusCode.NOT_FOUND


async def test_a_cancelled_stream_aborts_all_its_sequences(
    engine: FakeEngineClient, stub: Any
) -> None:
    engine.hang_after = 2
    call = stub.Chat(chat_request(sampling_params={"n": 2}))
    await call.read()
    call.cancel()
    await until(lambda: engine.aborted)
    assert engine.live == set()


async def test_a_cancelled_unary_call_aborts(engine: FakeEngineClient, stub: Any) -> None:
    engine.hang_after = 0
    call = stub.GenerateUnary(inference_pb2.GenerateRequest(text="a"))
    await until(lambda: engine.live)
    call.cancel()
    await until(lambda: engine.aborted)


async def test_a_clients_connection_that_breaks_aborts(
    engine: FakeEngineClient, server: FrontendServer
) -> None:
    engine.hang_after = 1
    async with grpc_stub(server) as stub:
        await stub.Chat(chat_request()).read()
    await until(lambda: engine.aborted)


@pytest.mark.parametrize("method", ["Chat", "ChatUnary"])
async def test_a_deadline_that_passes_aborts(
    engine: FakeEngineClient, stub: Any, method: str
) -> None:
    engine.hang_after = 1
    call = getattr(stub, method)(chat_request(), timeout=2)
    await until(lambda: engine.live)
    error = await failure(call)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: engine.aborted)


async def test_a_live_request_id_is_refused_and_a_later_one_is_fine(
    engine: FakeEngineClient, stub: Any
) -> None:
    engine.hang_after = 1
    first = stub.Chat(chat_request(request_id="same"))
    await first.read()
    error = await failure(stub.Chat(chat_request(request_id="same")))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    first.cancel()
    await until(lambda: engine.aborted)
    engine.hang_after = None
    assert (await stub.ChatUnary(chat_request(request_id="same"))).request_id == "same"


async def test_errors_carry_the_field_for_any_client(stub: Any) -> None:
    error = await failure(stub.Chat(chat_request(sampling_params={"temperature": -1})))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    assert details_of(error)[0].Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert violation.field == "sampling_params.temperature"
    assert violation.description in str(error.details())


async def test_a_message_of_100_mb_is_refused_and_the_server_lives(stub: Any) -> None:
    request = inference_pb2.TokenizeRequest(text="x" * (100 << 20))
    error = await failure(stub.Tokenize(request))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.ChatUnary(chat_request())).choices[0].content == "Hello, world!"


async def test_health_tells_liveness_from_readiness(
    engine: FakeEngineClient, server: FrontendServer
) -> None:
    async with grpc.aio.insecure_channel(f"localhost:{server.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]  # untyped

        async def status(service: str) -> Any:
            request = health_pb2.HealthCheckRequest(service=service)
            return (await health.Check(request)).status

        assert await status("") == SERVING
        assert await status("pagewire.v1.Inference") == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service="pagewire.v1.Inference"))
        assert (await watch.read()).status == SERVING
        engine.is_ready = False
        assert (await watch.read()).status == NOT_SERVING
        assert await status("") == SERVING
        engine.is_ready = True
        assert (await watch.read()).status == SERVING
        error = await failure(health.Check(health_pb2.HealthCheckRequest(service="nope")))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(server: FrontendServer) -> None:
    def reflect() -> tuple[set[str], list[str]]:
        with grpc.insecure_channel(f"localhost:{server.grpc_port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("pagewire.v1.Inference")
            return set(database.get_services()), [method.name for method in file.service[0].method]

    services, methods = await asyncio.to_thread(reflect)
    assert {
        "pagewire.v1.Inference",
        "pagewire.v1.Adapters",
        "pagewire.v1.Observability",
        "grpc.health.v1.Health",
    } <= services
    assert "Chat" in methods


async def test_adapters_and_observability_say_that_they_are_off(server: FrontendServer) -> None:
    async with grpc.aio.insecure_channel(f"localhost:{server.grpc_port}") as channel:
        adapters = operations_pb2_grpc.AdaptersStub(channel)
        observability = operations_pb2_grpc.ObservabilityStub(channel)
        for call in (
            adapters.Load(engine_pb2.LoadAdapterRequest()),
            adapters.Unload(engine_pb2.UnloadAdapterRequest()),
            adapters.List(engine_pb2.ListAdaptersRequest()),
            observability.WatchStats(engine_pb2.GetStatsRequest()),
        ):
            error = await failure(call)
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "start the frontend with --allow-" in str(error.details())


async def test_an_allowed_watcher_sees_the_engine_and_no_request_s_id() -> None:
    engine = FakeEngineClient(hang_after=1)
    async with (
        running_frontend(engine, allow_watch_stats=True) as server,
        grpc_stub(server) as stub,
    ):
        secrets = [stub.Chat(chat_request(request_id=f"secret-{name}")) for name in "ab"]
        for call in secrets:
            await call.read()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            observability = operations_pb2_grpc.ObservabilityStub(channel)
            asked = engine_pb2.GetStatsRequest(interval_ms=1, with_window=True)
            watching = observability.WatchStats(asked)
            first, second = await watching.read(), await watching.read()
            assert b"secret" not in first.SerializeToString() + second.SerializeToString()
            ids = [view.id for view in first.window.requests]
            assert ids == [view.id for view in second.window.requests] == ["1", "2"]
            assert first.num_running == 2
            watching.cancel()
            engine.hang_after = None
            await stub.ChatUnary(chat_request())
            once = observability.WatchStats(engine_pb2.GetStatsRequest())
            (stats,) = [stats async for stats in once]
            assert sum(stats.time_to_first_token.counts) == 1
            assert len(stats.time_to_first_token.bounds) + 1 == len(
                stats.time_to_first_token.counts
            )
            engine.is_ready = False
            error = await failure(observability.WatchStats(asked))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        for call in secrets:
            call.cancel()


async def test_the_watchers_of_a_frontend_are_limited() -> None:
    async with (
        running_frontend(FakeEngineClient(), allow_watch_stats=True) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        observability = operations_pb2_grpc.ObservabilityStub(channel)
        asked = engine_pb2.GetStatsRequest(interval_ms=100)
        watchers = [observability.WatchStats(asked) for _ in range(MAX_WATCHERS)]
        for watching in watchers:
            await watching.read()
        error = await failure(observability.WatchStats(asked))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_WATCHERS} clients watch" in str(error.details())
        once = observability.WatchStats(engine_pb2.GetStatsRequest())
        assert len([stats async for stats in once]) == 1
        watchers[0].cancel()
        for _ in range(1500):
            if isinstance(await _first_of(observability.WatchStats(asked)), Message):
                return
            await asyncio.sleep(0.02)
        pytest.fail("the place of a watcher that left stays taken")


async def _first_of(call: Any) -> Any:
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        call.cancel()


async def test_a_watcher_does_not_hold_up_the_end() -> None:
    async with running_frontend(
        FakeEngineClient(), allow_watch_stats=True, grace_period_s=300.0
    ) as server:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        watching = operations_pb2_grpc.ObservabilityStub(channel).WatchStats(
            engine_pb2.GetStatsRequest(interval_ms=100)
        )
        await watching.read()
        started = time.monotonic()
    assert time.monotonic() - started < 150
    await channel.close()


@pytest.mark.slow
async def test_frequent_pings_do_not_end_a_silent_stream(
    engine: FakeEngineClient, server: FrontendServer
) -> None:
    # Unless the server says otherwise, core cuts a client off at its third early ping (the default
    # interval is five minutes); one a second, core's lower bound, stands for one in thirty.
    engine.hang_after = 1
    options = [
        ("grpc.keepalive_time_ms", 200),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    target = f"127.0.0.1:{server.grpc_port}"
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Chat(chat_request())
        await call.read()
        waiting = asyncio.ensure_future(call.read())
        await asyncio.wait({waiting}, timeout=4.5)
        assert not waiting.done(), "the stream was cut"
        waiting.cancel()


async def test_before_the_engine_is_there_calls_fail_as_unavailable_at_once() -> None:
    engine = FakeEngineClient(reachable=False)
    from pagewire_frontend.config import FrontendConfig

    server = FrontendServer(FrontendConfig(http_port=0, grpc_port=0), engine)
    await server.start(wait_for_engine=False)
    try:
        async with grpc_stub(server) as stub:
            error = await failure(stub.Chat(chat_request()))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert details_of(error)[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
            engine.reachable = True
            await asyncio.wait_for(server.wait_until_connected(), 60)
            assert (await stub.ChatUnary(chat_request())).choices[0].content == "Hello, world!"
    finally:
        await server.stop(0.0)


async def test_an_engine_that_dies_ends_streams_as_unavailable(
    engine: FakeEngineClient, stub: Any
) -> None:
    engine.fail_after = 2
    received: list[Any] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(stub.Chat(chat_request()), received)
    assert "".join(part.choices[0].content for part in received) == "He"
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_stopping_lets_running_streams_end(engine: FakeEngineClient) -> None:
    engine.delay_s = 0.02
    async with running_frontend(engine, grace_period_s=60.0) as server, grpc_stub(server) as stub:
        parts = aiter(stub.Chat(chat_request()))
        first = await anext(parts)
        stopping = asyncio.create_task(server.stop())
        rest = [part async for part in parts]
        await stopping
    text = "".join(part.choices[0].content for part in [first, *rest])
    assert text == "Hello, world!"
    assert engine.aborted == []


async def test_a_port_in_use_is_an_error_and_not_a_second_server(server: FrontendServer) -> None:
    with pytest.raises(OSError, match="--grpc-port"):
        async with running_frontend(FakeEngineClient(), grpc_port=server.grpc_port):
            pass
    with pytest.raises(OSError, match="--http-port"):
        async with running_frontend(FakeEngineClient(), http_port=server.http_port):
            pass
