"""Ten times what an engine can do, in an open loop through a real frontend, half by HTTP and half
by gRPC: who is admitted is answered in time, the rest is refused at once, and memory stays flat.

    python -m tests.bench.overload [--times 10] [--seconds 20]

The engine is the real one over a fake executor, whose steps take a fixed time: its capacity is
known. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.fakes.fake_engine import FakeEngineProcess
from tests.fakes.real_processes import RealFrontend

STEP_S = 0.02
NUM_SEQS = 4
NUM_TOKENS = 25
NUM_WAITING = 8
# What the last of a full queue takes, three times over.
DEADLINE_S = 3 * (NUM_WAITING / NUM_SEQS + 1) * NUM_TOKENS * STEP_S
ANSWERED, REFUSED, LATE = "answered", "refused", "late"


@dataclass
class Seen:
    """What became of the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    num_without_hint: int = 0

    def count(self, end: str, seconds: float, hinted: bool = True) -> None:
        self.ends[end] += 1
        if end == ANSWERED:
            self.answered_s.append(seconds)
        elif end == REFUSED:
            self.refused_s.append(seconds)
            self.num_without_hint += not hinted


async def by_http(http: httpx.AsyncClient, seen: Seen) -> None:
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    began = time.monotonic()
    try:
        answer = await http.post("/v1/completions", json=body, timeout=DEADLINE_S)
    except httpx.TimeoutException:
        seen.count(LATE, DEADLINE_S)
        return
    passed = time.monotonic() - began
    if answer.status_code == 200:
        seen.count(ANSWERED, passed)
    elif answer.status_code == 429:
        seen.count(REFUSED, passed, hinted="retry-after" in answer.headers)
    else:
        seen.count(str(answer.status_code), passed)


async def by_grpc(stub: Any, seen: Seen) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
        sampling_params=sampling_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    began = time.monotonic()
    try:
        await stub.GenerateUnary(request, timeout=DEADLINE_S)
        seen.count(ANSWERED, time.monotonic() - began)
    except grpc.aio.AioRpcError as error:
        passed = time.monotonic() - began
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            status = rpc_status.from_call(error)
            details = [] if status is None else status.details
            hinted = any(one.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for one in details)
            seen.count(REFUSED, passed, hinted)
        elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            seen.count(LATE, passed)
        else:
            seen.count(error.code().name, passed)


async def offer(frontend: RealFrontend, rate: float, seconds: float) -> Seen:
    """Requests by the clock, whatever becomes of those before."""
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    address = frontend.http.replace("localhost", "127.0.0.1")
    async with (
        httpx.AsyncClient(base_url=address, limits=limits) as http,
        grpc.aio.insecure_channel(frontend.grpc.replace("localhost", "127.0.0.1")) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        began = time.monotonic()
        tasks = []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            call = by_http(http, seen) if number % 2 else by_grpc(stub, seen)
            tasks.append(asyncio.create_task(call))
        await asyncio.gather(*tasks)
    return seen


def run_overload(times: float = 10.0, seconds: float = 20.0) -> dict[str, Any]:
    """Measures; see the module."""
    import psutil

    capacity = NUM_SEQS / (NUM_TOKENS * STEP_S)
    config = {"max_num_seqs": NUM_SEQS, "max_waiting_requests": NUM_WAITING}
    with (
        FakeEngineProcess(config, step_time_s=STEP_S) as engine,
        RealFrontend(engine.target) as frontend,
    ):

        def resident_mb() -> dict[str, float]:
            pids = {"frontend": frontend.pid, "engine": engine.pid}
            return {
                name: round(psutil.Process(pid).memory_info().rss / 2**20, 1)
                for name, pid in pids.items()
            }

        # What every process needs once: connections, buffers, the code's own caches.
        asyncio.run(offer(frontend, times * capacity, max(3.0, seconds / 4)))
        before = resident_mb()
        seen = asyncio.run(offer(frontend, times * capacity, seconds))
        after = resident_mb()
        assert frontend.alive
        assert engine.alive
    offered = seen.ends.total()
    admitted = offered - seen.ends[REFUSED]
    refused_ms = sorted(1000 * passed for passed in seen.refused_s)
    return {
        "capacity_per_s": capacity,
        "offered_per_s": times * capacity,
        "seconds": seconds,
        "offered": offered,
        "admitted": admitted,
        "answered_in_deadline": seen.ends[ANSWERED],
        "in_deadline_share": round(seen.ends[ANSWERED] / max(1, admitted), 4),
        "deadline_s": DEADLINE_S,
        "answered_s_median": round(statistics.median(seen.answered_s), 3),
        "refused": seen.ends[REFUSED],
        "refusal_ms_median": round(statistics.median(refused_ms), 1),
        "refusal_ms_p99": round(refused_ms[int(0.99 * (len(refused_ms) - 1))], 1),
        "refused_without_hint": seen.num_without_hint,
        "other_ends": {
            end: n for end, n in seen.ends.items() if end not in (ANSWERED, REFUSED, LATE)
        },
        "rss_mb_before": before,
        "rss_mb_after": after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print(json.dumps(run_overload(arguments.times, arguments.seconds)))


if __name__ == "__main__":
    main()
