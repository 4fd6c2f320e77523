"""Clients that ask for much and read nothing: they are cut off at limits, what they held comes
back, and the streams beside them run on."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.wire_peer import WirePeer, wait_until_async
from tests.fakes.fake_engine import VOCAB_SIZE, FakeEngine, fake_config
from tests.fakes.fake_engine_client import byte_tokenizer, tokenizer_files
from tests.fakes.real_processes import RealFrontend

TIMEOUT_S = 1.5
NUM_TOKENS = 3000
# 60 kB a step or so as messages, more than sockets and HTTP/2 windows hold after some hundred.
MUCH = {"temperature": 1.0, "seed": 1, "n": 16, "logprobs": 20, "max_tokens": NUM_TOKENS}
LIMIT_S = 120.0


@dataclass(frozen=True)
class Servers:
    """A frontend of its own process, over a fake engine in this one."""

    frontend: RealFrontend
    peer: WirePeer

    def cut_off(self, api: str) -> int:
        """Clients of this API that were cut off."""
        text = httpx.get(f"{self.frontend.http}/metrics", trust_env=False, timeout=60).text
        found = re.search(rf'pagewire_slow_clients_cut_off_total{{.*api="{api}".*}} (\S+)', text)
        return int(float(found[1])) if found else 0

    async def until_nothing_is_held(self) -> None:
        await wait_until_async(lambda: self.peer.stats().num_running == 0, "it was aborted", 60)
        await wait_until_async(lambda: self.peer.num_held_blocks() == 0, "the blocks are back", 60)


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    files = tokenizer_files(tokenizer=byte_tokenizer(num_words=VOCAB_SIZE - 256 - 3))
    config = fake_config(max_num_seqs=128)
    with (
        FakeEngine(config, tokenizer_files=files, num_blocks=30_000, step_time_s=0.001) as engine,
        WirePeer(engine.target) as peer,
        RealFrontend(engine.target, f"--slow-client-timeout={request.param}") as frontend,
    ):
        yield Servers(frontend, peer)


def generate_request(**sampling: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": [1, 2, 3]}, sampling_params={"ignore_eos": True, **sampling}
    )


async def count(messages: AsyncIterator[Any], counts: list[int]) -> None:
    """Adds the tokens of each sequence up."""
    async for message in messages:
        for output in message.outputs:
            counts[output.index] += len(output.token_ids)


async def read_a_neighbour(stub: inference_pb2_grpc.InferenceStub, num_tokens: int) -> None:
    """A stream beside, read as it comes, to its end."""
    request = generate_request(temperature=0.0, max_tokens=num_tokens)
    got = 0
    async for message in stub.Generate(request):
        got += sum(len(output.token_ids) for output in message.outputs)
    assert got == num_tokens


@pytest.mark.parametrize("servers", [TIMEOUT_S], indirect=True)
async def test_a_grpc_client_gets_resource_exhausted_after_what_it_had(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        messages = aiter(stub.Generate(generate_request(**MUCH)))
        first = await anext(messages)
        await read_a_neighbour(stub, 300)
        await wait_until_async(lambda: servers.cut_off("grpc") == 1, "it is cut off", LIMIT_S)
        await servers.until_nothing_is_held()
        # Now it reads: what was on its way, and why there is no more.
        counts = [len(output.token_ids) for output in first.outputs]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await count(messages, counts)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read nothing for 1.5 s" in (failed.value.details() or "")
        # Of some sequences maybe nothing: what had gathered is sent one after another.
        assert 0 < max(counts) < NUM_TOKENS
        await read_a_neighbour(stub, 20)
    assert "Traceback" not in servers.frontend.output


@pytest.mark.slow
@pytest.mark.parametrize("servers", [TIMEOUT_S], indirect=True)
async def test_a_grpc_client_that_leaves_before_it_reads_is_no_error(servers: Servers) -> None:
    async with grpc.aio.insecure_channel(servers.frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(generate_request(**MUCH))
        await call.read()
        await wait_until_async(lambda: servers.cut_off("grpc") == 1, "it is cut off", LIMIT_S)
        call.cancel()
        await servers.until_nothing_is_held()
        await read_a_neighbour(stub, 20)
    assert "Traceback" not in servers.frontend.output


@pytest.mark.parametrize("servers", [TIMEOUT_S], indirect=True)
async def test_an_http_client_s_connection_ends(servers: Servers) -> None:
    body = {**MUCH, "prompt": [1, 2, 3], "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    address = urlsplit(servers.frontend.http)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", address.port))
        client.sendall(head.encode() + data)
        assert client.recv(12) == b"HTTP/1.1 200"
        async with grpc.aio.insecure_channel(servers.frontend.grpc) as channel:
            await read_a_neighbour(inference_pb2_grpc.InferenceStub(channel), 300)
        await wait_until_async(lambda: servers.cut_off("http") == 1, "it is cut off", LIMIT_S)
        await servers.until_nothing_is_held()
        client.settimeout(LIMIT_S)
        rest = b""
        try:
            while piece := await asyncio.to_thread(client.recv, 1 << 16):
                rest = rest[-100:] + piece
        except ConnectionResetError:
            pass
        assert b"[DONE]" not in rest
    assert "Traceback" not in servers.frontend.output


@pytest.mark.slow
@pytest.mark.parametrize("servers", [600.0], indirect=True)
async def test_what_waits_for_a_client_is_bounded_in_bytes_too(servers: Servers) -> None:
    """All that this one asks for would take some 800 MB of the frontend."""
    async with grpc.aio.insecure_channel(servers.frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await read_a_neighbour(stub, 20)
        before = servers.frontend.resident_bytes
        messages = aiter(stub.Generate(generate_request(**MUCH | {"n": 80})))
        await anext(messages)
        peak = 0
        async with asyncio.timeout(400):
            while servers.peer.stats().num_running:
                peak = max(peak, servers.frontend.resident_bytes - before)
                await asyncio.sleep(0.05)
        await servers.until_nothing_is_held()
        assert peak < 300 << 20
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await count(messages, [0] * 80)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "MiB wait for it" in (failed.value.details() or "")
