"""Clients of the wire benchmark: they note when each message came, and think about it later.

Run as a program, it prints one line of JSON: when it began, and for each stream the arrivals, as
pairs of a time of the monotonic clock and the token ids of the message.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, TrailersReceived
from h2.settings import SettingCodes

from pagewire.v1 import inference_pb2, sampling_pb2

GENERATE = "/pagewire.v1.Inference/Generate"
GRPC_PREFIX = struct.Struct(">BI")  # compressed?, length
WINDOW = 2**31 - 1
FLOOD_FIRST_S, FLOOD_SILENCE_S = 30.0, 5.0

Arrivals = list[tuple[float, list[int]]]


def generate_request(prompt: list[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling_params=sampling_pb2.SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0
        ),
    )


async def grpc_stream(
    channel: grpc.aio.Channel, prompt: list[int], max_tokens: int
) -> list[tuple[float, bytes]]:
    """One Generate call; messages stay bytes, so that their parsing costs the clock nothing."""
    call = channel.unary_stream(
        GENERATE, request_serializer=inference_pb2.GenerateRequest.SerializeToString
    )(generate_request(prompt, max_tokens))
    return [(time.monotonic(), data) async for data in call]


def parsed(messages: list[tuple[float, bytes]]) -> Arrivals:
    """Times and token ids of one stream's messages."""
    arrivals: Arrivals = []
    for at, data in messages:
        response = inference_pb2.GenerateResponse.FromString(data)
        ids = [token for output in response.outputs for token in output.token_ids]
        if ids:
            arrivals.append((at, ids))
    return arrivals


def run_flood(port: int, prompts: list[list[int]], max_tokens: int) -> list[Arrivals]:
    """All prompts at once over one connection, by a client that computes nothing while it reads.

    A gRPC client in Python needs a core for what a frontend on one core writes, and would be what
    is measured. This one notes when bytes came; the HTTP/2 frames in them are read at the end.
    """
    protocol = H2Connection(H2Configuration(header_encoding="utf-8"))
    protocol.initiate_connection()
    protocol.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
    protocol.increment_flow_control_window(WINDOW - protocol.inbound_flow_control_window)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", GENERATE),
        (":authority", f"127.0.0.1:{port}"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    streams = []
    for prompt in prompts:
        stream = protocol.get_next_available_stream_id()
        message = generate_request(prompt, max_tokens).SerializeToString()
        protocol.send_headers(stream, headers)
        protocol.send_data(stream, GRPC_PREFIX.pack(0, len(message)) + message, end_stream=True)
        streams.append(stream)
    chunks: list[tuple[float, bytes]] = []
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(protocol.data_to_send())
        connection.settimeout(FLOOD_FIRST_S)
        with suppress(TimeoutError):
            while size := connection.recv_into(buffer):
                chunks.append((time.monotonic(), bytes(buffer[:size])))
                connection.settimeout(FLOOD_SILENCE_S)
    return read_flood(protocol, streams, chunks)


def read_flood(
    protocol: H2Connection, streams: list[int], chunks: list[tuple[float, bytes]]
) -> list[Arrivals]:
    """The messages of each stream in what a connection brought; each must have ended with OK."""
    arrived: dict[int, list[tuple[float, bytes]]] = {stream: [] for stream in streams}
    unread = dict.fromkeys(streams, b"")
    ended: dict[int, str] = {}
    for at, data in chunks:
        for event in protocol.receive_data(data):
            if isinstance(event, DataReceived):
                buffer = unread[event.stream_id] + event.data
                while len(buffer) >= GRPC_PREFIX.size:
                    _, length = GRPC_PREFIX.unpack_from(buffer)
                    end = GRPC_PREFIX.size + length
                    if len(buffer) < end:
                        break
                    arrived[event.stream_id].append((at, buffer[GRPC_PREFIX.size : end]))
                    buffer = buffer[end:]
                unread[event.stream_id] = buffer
            elif isinstance(event, TrailersReceived):
                ended.update(
                    (event.stream_id, str(value))
                    for name, value in event.headers
                    if name == "grpc-status"
                )
    wrong = {stream: ended.get(stream) for stream in streams if ended.get(stream) != "0"}
    assert not wrong, f"streams that did not end well, and their statuses: {wrong}"
    return [parsed(arrived[stream]) for stream in streams]


async def run_grpc(port: int, prompts: list[list[int]], max_tokens: int) -> list[Arrivals]:
    """All prompts at once over one channel."""
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        streams = await asyncio.gather(
            *(grpc_stream(channel, prompt, max_tokens) for prompt in prompts)
        )
    return [parsed(messages) for messages in streams]


async def http_stream(port: int, prompt: list[int], max_tokens: int) -> Arrivals:
    """One streamed completion; the number of its tokens is told at the end, not with each chunk."""
    body = json.dumps(
        {
            "model": "",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    lines = [(time.monotonic(), line) async for line in reader if line.startswith(b"data: {")]
    writer.close()
    usages: list[dict[str, Any]] = [
        chunk["usage"] for _, line in lines if (chunk := json.loads(line[6:])).get("usage")
    ]
    assert usages, "the stream ended without usage"
    return [(lines[-1][0], [0] * usages[-1]["completion_tokens"])]


async def run_http(port: int, prompts: list[list[int]], max_tokens: int) -> list[Arrivals]:
    """All prompts at once, a connection each."""
    return await asyncio.gather(*(http_stream(port, prompt, max_tokens) for prompt in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", choices=("grpc", "http", "flood"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    arguments = parser.parse_args()
    asked = arguments.port, arguments.prompts, arguments.max_tokens
    # Its pauses would be blamed on the wires.
    gc.disable()
    began = time.monotonic()
    if arguments.protocol == "flood":
        arrivals = run_flood(*asked)
    else:
        import uvloop

        run = run_grpc if arguments.protocol == "grpc" else run_http
        with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
            arrivals = runner.run(run(*asked))
    print(json.dumps({"began": began, "arrivals": arrivals}), flush=True)


if __name__ == "__main__":
    main()
