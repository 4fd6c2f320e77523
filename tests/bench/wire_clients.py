"""Clients of the wire benchmark: they note when each message came, and think about it later.

Run as a program, it prints one line of JSON: when it began, and for each stream the arrivals, as
pairs of a time of the monotonic clock and the token ids of the message.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from typing import Any

import grpc

from pagewire.v1 import inference_pb2, sampling_pb2

GENERATE = "/pagewire.v1.Inference/Generate"
Arrivals = list[tuple[float, list[int]]]


async def grpc_stream(
    channel: grpc.aio.Channel, prompt: list[int], max_tokens: int
) -> list[tuple[float, bytes]]:
    """One Generate call; messages stay bytes, so that their parsing costs the clock nothing."""
    call = channel.unary_stream(
        GENERATE, request_serializer=inference_pb2.GenerateRequest.SerializeToString
    )(
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling_params=sampling_pb2.SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0.0
            ),
        )
    )
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
    parser.add_argument("--protocol", choices=("grpc", "http"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    arguments = parser.parse_args()
    run = run_grpc if arguments.protocol == "grpc" else run_http
    import uvloop

    # Its pauses would be blamed on the wires.
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        began = time.monotonic()
        arrivals = runner.run(run(arguments.port, arguments.prompts, arguments.max_tokens))
    print(json.dumps({"began": began, "arrivals": arrivals}), flush=True)


if __name__ == "__main__":
    main()
