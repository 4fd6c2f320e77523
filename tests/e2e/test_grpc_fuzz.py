"""Messages of every kind and value, and bytes that are none, at every method of the gRPC API: each
call is served or refused with a reason, and the server goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from pagewire.pooling import PoolingInfo, Task
from pagewire.v1 import inference_pb2, operations_pb2
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.server import FrontendServer
from tests.e2e.test_frontend_process import fake_engine
from tests.fakes.bad_inputs import tried
from tests.fakes.fake_adapters import write_fake_adapter
from tests.fakes.fake_engine import FakeEngine, fake_config
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import chat_request, running_frontend

MESSAGES_A_METHOD = 60
METHODS: list[MethodDescriptor] = [
    method
    for file in (inference_pb2, operations_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
OF_THE_MODEL = [method for method in METHODS if method.containing_service.name == "Inference"]
SERVED_BY = {
    "generates": {"Generate", "GenerateUnary", "Chat", "ChatUnary", "RenderChat"},
    "embeds": {"Embed", "EmbedStream", "Score"},
    "classifies": {"Classify"},
}
# What an error of ours or a slip in the code would be.
FAULTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
TEXTS = ["", "a", "user", "assistant", "fake-model", "nobody", "<|im_start|>", "é" * 40, "\0", "{}"]
INTEGERS = [0, 1, 2, 5, 7, 128, 2**31 - 1]
FLOATS = [0.0, 0.5, 1.0, -1.0, 2.5, float("nan"), float("inf"), 1e300]
MOST_NESTED = 4
# Half of the messages are made of these, so that some come far.
GOOD: dict[str, Message] = {
    "GenerateRequest": inference_pb2.GenerateRequest(text="a"),
    "ChatRequest": chat_request(),
    "RenderChatRequest": inference_pb2.RenderChatRequest(messages=chat_request().messages),
    "EmbedRequest": inference_pb2.EmbedRequest(texts=["a"]),
    "ClassifyRequest": inference_pb2.ClassifyRequest(texts=["a"]),
    "ScoreRequest": inference_pb2.ScoreRequest(query="a", texts=["a"]),
}


def fill(message: Message, chance: random.Random, density: float, depth: int = 0) -> None:
    """Sets about so many of a message's fields, those of one oneof over one another."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > density or (field.message_type is not None and depth > MOST_NESTED):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            for _ in range(chance.randrange(3)):
                fill(value[scalar(entry["key"], chance)], chance, density, depth + 1)
        elif field.is_repeated:
            for _ in range(chance.randrange(4)):
                if field.message_type is None:
                    value.append(scalar(field, chance))
                else:
                    fill(value.add(), chance, density, depth + 1)
        elif field.message_type is None:
            setattr(message, field.name, scalar(field, chance))
        else:
            value.SetInParent()
            fill(value, chance, density, depth + 1)


def scalar(field: FieldDescriptor, chance: random.Random) -> Any:
    kind = field.cpp_type
    if field.name == "model":
        return chance.choice(["", "fake-model", "fake", "nobody"])
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(FLOATS)
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return chance.choice([*INTEGERS, -1, -(2**31)])
    return chance.choice(INTEGERS)


def class_of(descriptor: Descriptor) -> type[Message]:
    return message_factory.GetMessageClass(descriptor)


CLIENTS: dict[str, dict[str, Any]] = {
    "generates": {"reply": lambda request, index: "ok", "tokens_a_step": 4},
    "embeds": {"tasks": (Task.EMBED, Task.SCORE), "pooling": PoolingInfo(8)},
    "classifies": {"tasks": (Task.CLASSIFY,), "pooling": PoolingInfo(3, labels=("a", "b", "c"))},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    """A real engine, over a fake executor: what the scripted one takes, it looks at."""
    folder = tmp_path_factory.mktemp("adapters")
    write_fake_adapter(folder / "a")
    config = fake_config(enable_lora=True, lora_dir=str(folder))
    with fake_engine(config=config, max_model_len=128) as running:
        yield running


async def ask(
    server: FrontendServer, method: MethodDescriptor, data: list[bytes]
) -> set[grpc.StatusCode]:
    """The statuses of calls with each of the messages."""
    target = f"127.0.0.1:{server.grpc_port}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    codes = set()
    async with grpc.aio.insecure_channel(target) as channel:
        for one in data:
            tried["gRPC messages"] += 1
            try:
                if method.server_streaming:
                    call = channel.unary_stream(path)(one, timeout=60)
                    # A watcher's first look; else to the end.
                    while await call.read() is not grpc.aio.EOF and method.name != "WatchStats":
                        pass
                    call.cancel()
                else:
                    await channel.unary_unary(path)(one, timeout=60)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
            else:
                codes.add(grpc.StatusCode.OK)
    return codes


def messages_for(method: MethodDescriptor) -> list[bytes]:
    chance = random.Random(method.full_name)
    data = []
    for _ in range(MESSAGES_A_METHOD):
        message = class_of(method.input_type)()
        density = chance.choice([0.1, 0.3, 0.7])
        if method.input_type.name in GOOD and chance.random() < 0.5:
            message.CopyFrom(GOOD[method.input_type.name])
            density = 0.1
        fill(message, chance, density)
        data.append(message.SerializeToString())
    return data


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("method", OF_THE_MODEL, ids=lambda method: method.name)
async def test_whatever_a_message_says_it_is_served_or_refused(
    method: MethodDescriptor, kind: str
) -> None:
    client = FakeEngineClient(**CLIENTS[kind])
    async with running_frontend(client) as server:
        codes = await ask(server, method, messages_for(method))
        assert not codes & FAULTS, codes
        assert not client.live
        if method.name in SERVED_BY[kind]:
            assert grpc.StatusCode.OK in codes, "no message comes far"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_whatever_an_engine_is_told_it_goes_on(
    method: MethodDescriptor, engine: FakeEngine
) -> None:
    client = RemoteEngineClient(engine.target)
    allowed = {"allow_watch_stats": True, "allow_runtime_lora_updating": True}
    async with running_frontend(client, **allowed) as server:
        codes = await ask(server, method, messages_for(method))
        assert not codes & FAULTS, codes
    assert not engine.server.died


async def test_bytes_that_are_no_message_harm_nobody() -> None:
    chance = random.Random(0)
    client = FakeEngineClient()
    async with running_frontend(client) as server:
        for method in METHODS:
            noise = [b"\xff" + chance.randbytes(chance.randrange(60)) for _ in range(10)]
            assert grpc.StatusCode.OK not in await ask(server, method, noise)
        message = inference_pb2.ListModelsRequest().SerializeToString()
        models = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name
        assert await ask(server, models["ListModels"], [message]) == {grpc.StatusCode.OK}
    assert not client.requests
