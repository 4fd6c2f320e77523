"""Answers above the 4 MiB that gRPC clients take by default: unary calls say how to have them, and
streams bring them in parts."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pagewire.pooling import PoolingInfo, Task
from pagewire.v1 import inference_pb2
from pagewire_frontend.grpc_api import reply_size, vectors
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, grpc_stub, running_frontend

EMBEDS: dict[str, Any] = {"tasks": (Task.EMBED,), "pooling": PoolingInfo(1024)}
TEXTS = ["a"] * 1200
PROMPT = [i % 256 for i in range(2_000)]


def asks_for_logprobs() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": PROMPT}, sampling_params={"prompt_logprobs": 20}
    )


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await call
    assert info.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(info.value.details())


async def test_thousands_of_vectors_are_refused_before_they_are_made_and_come_in_parts() -> None:
    client = FakeEngineClient(**EMBEDS)
    request = inference_pb2.EmbedRequest(texts=TEXTS)
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        told = await refused(stub.Embed(request))
        assert "EmbedStream" in told
        assert reply_size.METADATA_KEY in told
        assert not client.requests
        parts = [part async for part in stub.EmbedStream(request)]
        assert len(parts) > 2
        assert sum(len(part.embeddings) for part in parts) == len(TEXTS)
        assert len(client.requests) == len(TEXTS)
        assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].usage.prompt_tokens == len(TEXTS)
        few = await stub.Embed(inference_pb2.EmbedRequest(texts=TEXTS[:900]))
        assert few.ByteSize() > 3 << 20


async def test_a_client_that_takes_more_says_so_and_gets_it() -> None:
    client = FakeEngineClient(**EMBEDS)
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with running_frontend(client) as server:
        target = f"127.0.0.1:{server.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            embed = channel.unary_unary(
                "/pagewire.v1.Inference/Embed",
                request_serializer=inference_pb2.EmbedRequest.SerializeToString,
                response_deserializer=inference_pb2.EmbedResponse.FromString,
            )
            request = inference_pb2.EmbedRequest(texts=TEXTS)
            metadata = ((reply_size.METADATA_KEY, str(64 << 20)),)
            whole = await embed(request, metadata=metadata)
            assert len(whole.embeddings) == len(TEXTS)
            assert "EmbedStream" in await refused(embed(request))


async def test_a_long_prompts_log_probabilities_are_refused_whole_and_come_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_size, "CLIENT_DEFAULT", 100_000)
    client = FakeEngineClient(max_model_len=20_000, reply=lambda request, index: "OK")
    async with running_frontend(client) as server, grpc_stub(server) as stub:
        assert "call Generate" in await refused(stub.GenerateUnary(asks_for_logprobs()))
        parts = [part async for part in stub.Generate(asks_for_logprobs())]
        assert sum(len(part.prompt_logprobs) for part in parts) == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("method", "request_message", "remedy"),
    [
        ("ChatUnary", chat_request("x"), "call Chat"),
        ("Tokenize", inference_pb2.TokenizeRequest(text="x" * 99), "with_bytes"),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[5] * 99), "fewer token ids"),
        ("ListChatTemplates", inference_pb2.ListChatTemplatesRequest(), "smaller template"),
    ],
)
async def test_every_unary_answer_is_measured(
    monkeypatch: pytest.MonkeyPatch, method: str, request_message: Any, remedy: str
) -> None:
    monkeypatch.setattr(reply_size, "CLIENT_DEFAULT", 32)
    async with running_frontend(FakeEngineClient()) as server, grpc_stub(server) as stub:
        assert remedy in await refused(getattr(stub, method)(request_message))


async def test_a_vector_that_fills_a_message_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "MESSAGE_BUDGET", 1000)
    async with running_frontend(FakeEngineClient(**EMBEDS)) as server, grpc_stub(server) as stub:
        request = inference_pb2.EmbedRequest(texts=["a", "b"])
        parts = [part async for part in stub.EmbedStream(request)]
        assert [len(part.embeddings) for part in parts] == [1, 1]
