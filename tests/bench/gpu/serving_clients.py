"""gRPC clients of a server, in a process of their own: each streams one request after another.

Usage: python -m tests.bench.gpu.serving_clients MODEL PORT

Each line on standard input is an order, {"clients": .., "first": .., "stride": .., "limit": ..}:
which of A's requests to send, by how many clients. It is answered by one line of JSON: when the
first request was sent and the last token came, and what was seen in between.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

import grpc

from tests.bench.gpu.workloads import MODELS, mixed
from tests.bench.wire_clients import grpc_stream, parsed


async def run(
    port: int, prompts: list[list[int]], lengths: list[int], clients: int
) -> dict[str, Any]:
    """Sends all requests, a client each time it has got its answer."""
    taken = iter(range(len(prompts)))
    requests: list[tuple[int, float, list[tuple[float, bytes]]]] = []
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:

        async def call() -> None:
            for number in taken:
                sent = time.monotonic()
                messages = await grpc_stream(channel, prompts[number], lengths[number])
                requests.append((number, sent, messages))

        await asyncio.gather(*(call() for _ in range(clients)))
    return summary(lengths, requests)


def summary(
    lengths: list[int], requests: list[tuple[int, float, list[tuple[float, bytes]]]]
) -> dict[str, Any]:
    """Checks the lengths of the answers, and sums up their times."""
    first_token_s, messages, tokens, last = [], 0, 0, 0.0
    for number, sent, received in requests:
        arrivals = parsed(received)
        count = sum(len(ids) for _, ids in arrivals)
        assert count == lengths[number], f"request {number}: {count} tokens"
        first_token_s.append(arrivals[0][0] - sent)
        messages += len(arrivals)
        tokens += count
        last = max(last, arrivals[-1][0])
    return {
        "began": min(sent for _, sent, _ in requests),
        "ended": last,
        "tokens": tokens,
        "messages": messages,
        "first_token_s": first_token_s,
    }


def main() -> None:
    import uvloop

    model, port = MODELS[sys.argv[1]], int(sys.argv[2])
    prompts, lengths = mixed(model.scale)
    gc.disable()  # its pauses would be blamed on the server
    print(json.dumps({"requests": len(prompts)}), flush=True)
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        for line in sys.stdin:
            order = json.loads(line)
            chosen = slice(order["first"], order["limit"], order["stride"])
            answer = runner.run(run(port, prompts[chosen], lengths[chosen], order["clients"]))
            print(json.dumps(answer), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
