"""A model behind the server: gRPC streams through frontends, and step times under a storm.

`server`: so many clients stream the requests of A, one after another each. `submits`: the times of
steps in quiet, and under 50 Submits a second of long prompts while the statistics are streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire.settings import settings_to_argv
from pagewire_frontend.engine_client.base import EngineRequest, TokenStream
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from tests.bench.gpu.lines import Line
from tests.bench.gpu.settings import engine_settings
from tests.bench.gpu.tokenizer import write_tokenizer
from tests.bench.gpu.workloads import BenchModel
from tests.bench.wire import SUBMITS_PER_S, Program, frontend, program
from tests.fakes.fake_engine import free_port

_QUICK_WARM_UP = 128
_ABORTED_AFTER_S = 0.5
_STATS_INTERVAL_MS = 100
_SPAN_S, _QUICK_SPAN_S, _TURNS = 1.5, 0.5, 4
_SETTLES_AFTER_S = 0.5

_Span = tuple[float, float]  # of the monotonic clock, in seconds


@contextmanager
def running_engine(
    model: BenchModel, device: str, given: dict[str, str]
) -> Iterator[tuple[Program, int, float]]:
    """An engine with a tokenizer, the port of its control API, and seconds until it was ready."""
    with tempfile.TemporaryDirectory() as folder:
        config = model.config()
        (Path(folder) / "config.json").write_text(json.dumps(config))
        write_tokenizer(Path(folder), config["vocab_size"])
        port = free_port()
        settings = engine_settings(model, device, given) | {"model": folder, "port": port}
        flags = settings_to_argv(EngineConfig.model_validate(settings))
        began = time.monotonic()
        arguments = ("-m", "tests.bench.gpu.recorded_engine", *flags)
        with program(*arguments, until="is ready") as engine:
            yield engine, port, time.monotonic() - began


def run_server(
    model: BenchModel,
    engine_port: int,
    clients: Sequence[int],
    *,
    workers: int,
    rounds: int,
    quick: bool,
) -> Iterator[Line]:
    """Output tokens a second by so many streaming clients, over `workers` frontends.

    The clients are spread over one process a frontend, at least four where there are as many.
    """
    with ExitStack() as running:
        frontends = [running.enter_context(frontend(engine_port)) for _ in range(workers)]
        ports = [json.loads(each.greeting)["grpc"] for each in frontends]
        num_processes = min(max(4, workers), min(clients))
        processes = [
            running.enter_context(
                program(
                    *("-m", "tests.bench.gpu.serving_clients", model.name),
                    str(ports[index % workers]),
                    until="requests",
                )
            )
            for index in range(num_processes)
        ]
        for count in clients:
            yield _measured(processes, frontends, count, rounds, quick)


def _measured(
    processes: Sequence[Program],
    frontends: Sequence[Program],
    clients: int,
    rounds: int,
    quick: bool,
) -> Line:
    _ask(processes, clients, _QUICK_WARM_UP if quick else None)
    busy = sum(each.cpu_s() for each in frontends)
    answers = [_ask(processes, clients, None) for _ in range(rounds)]
    busy = sum(each.cpu_s() for each in frontends) - busy
    first_tokens = sorted(t for answer in answers for t in answer["first_token_s"])
    times = [answer["seconds"] for answer in answers]
    return {
        "test": "server",
        "batch": clients,
        "out_tok_s": round(answers[0]["tokens"] / statistics.median(times), 1),
        "workers": len(frontends),
        "first_token_ms_p50": round(1e3 * first_tokens[len(first_tokens) // 2], 1),
        "first_token_ms_p99": round(1e3 * first_tokens[len(first_tokens) * 99 // 100], 1),
        "tokens_per_message": round(answers[0]["tokens"] / answers[0]["messages"], 2),
        "frontend_cores_busy": round(busy / sum(times), 2),
        "runs_s": [round(seconds, 4) for seconds in times],
    }


def _ask(processes: Sequence[Program], clients: int, limit: int | None) -> dict[str, Any]:
    """Lets all processes send their parts of the requests, and puts their answers together."""
    share, more = divmod(clients, len(processes))
    for index, process in enumerate(processes):
        order = {
            "clients": share + (index < more),
            "first": index,
            "stride": len(processes),
            "limit": limit,
        }
        process.input.write(json.dumps(order) + "\n")
        process.input.flush()
    answers = [json.loads(process.line()) for process in processes]
    return {
        "seconds": max(a["ended"] for a in answers) - min(a["began"] for a in answers),
        "tokens": sum(answer["tokens"] for answer in answers),
        "messages": sum(answer["messages"] for answer in answers),
        "first_token_s": [t for answer in answers for t in answer["first_token_s"]],
    }


def run_submits(model: BenchModel, engine: Program, port: int, streams: int, quick: bool) -> Line:
    """The p99 of step times under the storm over that in quiet.

    As many streams run as the engine takes: the storm's requests wait behind them, and are aborted
    soon. What is measured is what the wires and the inbox cost the loop, not the prefill. Contexts
    grow meanwhile, and machines have bad moments: quiet and storm take turns.
    """
    span_s, turns = (_QUICK_SPAN_S, 1) if quick else (_SPAN_S, _TURNS)
    _step_ends(engine)
    spans = asyncio.run(_storms(model, port, streams, span_s, turns))
    ends = _step_ends(engine)
    times = {name: sorted(_step_times(ends, turns)) for name, turns in spans.items()}
    p99 = {name: _p99_ms(values) for name, values in times.items()}
    return {
        "test": "submits",
        "batch": streams,
        "ms_per_step": round(1e3 * statistics.fmean(times["storm"]), 3),
        "quiet_ms_per_step": round(1e3 * statistics.fmean(times["quiet"]), 3),
        "step_ms_p99": {name: round(value, 3) for name, value in p99.items()},
        "p99_ratio": round(p99["storm"] / p99["quiet"], 3),
        "steps": {name: len(values) for name, values in times.items()},
        "submits_per_s": SUBMITS_PER_S,
        "prompt_tokens": model.scale.storm_prompt,
    }


def _step_ends(engine: Program) -> list[float]:
    engine.input.write("\n")
    engine.input.flush()
    ends: list[float] = json.loads(engine.line())
    return ends


def _step_times(ends: Sequence[float], spans: Sequence[_Span]) -> Iterator[float]:
    """Seconds from one end of a step to the next, within those spans."""
    for begin, end in spans:
        for earlier, later in itertools.pairwise(t for t in ends if begin <= t <= end):
            yield later - earlier


def _p99_ms(ordered: Sequence[float]) -> float:
    return 1e3 * ordered[len(ordered) * 99 // 100]


async def _storms(
    model: BenchModel, port: int, streams: int, span_s: float, turns: int
) -> dict[str, list[_Span]]:
    client = RemoteEngineClient(f"127.0.0.1:{port}")
    await client.start()
    longest = model.scale.settings["max_model_len"]
    params = SamplingParams(temperature=0.0, max_tokens=longest - 1, ignore_eos=True)
    running = [
        await client.submit(EngineRequest(f"run-{number}", [10 + number], params))
        for number in range(streams)
    ]
    readers = [asyncio.create_task(_read(stream)) for stream in running]
    spans: dict[str, list[_Span]] = {"quiet": [], "storm": []}
    for turn in range(turns):
        await asyncio.sleep(_SETTLES_AFTER_S)
        spans["quiet"].append(await _span(span_s))
        watcher = asyncio.create_task(_watch(client))
        spans["storm"].append(await _storm(client, model, span_s, turn))
        watcher.cancel()
    for stream in running:
        await stream.abort()
    await asyncio.gather(*readers)
    await client.close()
    return spans


async def _storm(client: RemoteEngineClient, model: BenchModel, span_s: float, turn: int) -> _Span:
    begin = time.monotonic()
    storm = []
    for number in range(int(span_s * SUBMITS_PER_S)):
        await asyncio.sleep(max(0.0, begin + number / SUBMITS_PER_S - time.monotonic()))
        prompt = [10 + number % 400] * model.scale.storm_prompt
        name = f"storm-{turn}-{number}"
        storm.append(asyncio.create_task(_submit_and_abort(client, name, prompt)))
    end = time.monotonic()
    await asyncio.gather(*storm)
    return begin, end


async def _span(seconds: float) -> _Span:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return begin, time.monotonic()


async def _submit_and_abort(client: RemoteEngineClient, name: str, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    stream = await client.submit(EngineRequest(name, prompt, params))
    await asyncio.sleep(_ABORTED_AFTER_S)
    await stream.abort()


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def _watch(client: RemoteEngineClient) -> None:
    async with contextlib.aclosing(
        client.watch_stats(_STATS_INTERVAL_MS, with_window=True)
    ) as told:
        async for _ in told:
            pass
