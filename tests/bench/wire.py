"""What the wires cost: a flood from a fake engine, and the real model alone and through them.

Usage: python tests/bench/wire.py [--only paced|submits|smollm2] [--seconds S] [--rate TOK_S] [...]

`paced`: an engine without a model offers tokens at a fixed rate to a frontend on one core; one line
of JSON with the rate that came through, tokens a message, and the latency added between the
engine's step and the client. Asserts that nothing was lost or repeated. With `--sse` over HTTP,
with `--rate 0` as fast as it goes.

`submits`: step times of a fake engine in quiet, and under 50 Submits a second of 8k tokens each
while its figures are streamed.

`smollm2`: tokens per second of the engine alone, through the frontend by gRPC, and by HTTP; one
line each, with the ratio to the engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":  # as a file, too
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagewire.collector import settle_collector
from pagewire.sampling_params import SamplingParams
from pagewire_engine.tokenizer_files import load_tokenizer_files
from pagewire_frontend.engine_client.base import EngineRequest, TokenStream
from pagewire_frontend.engine_client.remote import RemoteEngineClient
from pagewire_frontend.model_download import smollm2_path
from pagewire_frontend.tokenizer import Tokenizer
from tests.bench.child import EngineProcess
from tests.bench.paced_engine import FIRST_WORD, NUM_WORDS, expected_token
from tests.bench.sse_flood import TextArrivals
from tests.bench.wire_clients import Arrivals
from tests.bench.workloads import NEW_TOKENS, cpu_prompts
from tests.fakes.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def program(*arguments: str, cores: set[int] | None = None, until: str) -> Iterator[Program]:
    """Runs a Python program of ours until the block ends; enters once it prints `until`."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    if cores:
        # Before its threads start: they inherit it.
        os.sched_setaffinity(process.pid, cores)
    running = Program(process)
    try:
        while until not in (line := running.line()):
            assert line, f"{' '.join(arguments)} ended early"
        running.greeting = line
        yield running
    finally:
        running.end_input()
        for end in (lambda: None, process.terminate, process.kill):
            end()
            try:
                process.wait(5)
                break
            except subprocess.TimeoutExpired:
                continue
        running.output.close()


class Program:
    """A running program, spoken to in lines. Ends when its standard input does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.greeting = ""
        self.input, self.output = process.stdin, process.stdout

    def line(self) -> str:
        return self.output.readline()

    def end_input(self) -> None:
        if not self.input.closed:
            self.input.close()

    def cpu_s(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve_frontend(engine_port: int) -> None:
    """The frontend's process, as its own command line runs it, with its ports told in JSON."""
    from pagewire_frontend.config import FrontendConfig
    from pagewire_frontend.server import FrontendServer

    server = FrontendServer(
        FrontendConfig(engine=f"127.0.0.1:{engine_port}", http_port=0, grpc_port=0)
    )
    await server.start()
    settle_collector()
    print(json.dumps({"grpc": server.grpc_port, "http": server.http_port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s=0.0)


def frontend(engine_port: int, cores: set[int] | None = None) -> Any:
    """A frontend in a process of its own."""
    arguments = ("-m", "tests.bench.wire", "--serve-frontend", str(engine_port))
    return program(*arguments, cores=cores, until="grpc")


def ask(
    protocol: str,
    frontend_: Program,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    cores: set[int] | None = None,
) -> tuple[float, list[Arrivals]]:
    """Sends all prompts at once from a process of its own.

    Returns:
        When they were sent, and what came, by prompt, and when; seconds of the monotonic clock.
    """
    by_http = protocol in ("http", "sse")
    arguments = {
        "--protocol": protocol,
        "--port": str(json.loads(frontend_.greeting)["http" if by_http else "grpc"]),
        "--prompts": json.dumps(prompts),
        "--max-tokens": str(max_tokens),
    }
    flat = [part for pair in arguments.items() for part in pair]
    client_program = "tests.bench.sse_flood" if protocol == "sse" else "tests.bench.wire_clients"
    with program("-m", client_program, *flat, cores=cores, until="began") as client:
        told = json.loads(client.greeting)
    return told["began"], told["arrivals"]


UNPACED_STEPS_PER_S = 1e9
UNPACED_TOKENS_PER_S = 200_000


def run_paced(
    streams: int,
    tokens_per_s: float,
    seconds: float,
    tokenizer: Path | None = None,
    *,
    sse: bool = False,
) -> dict[str, Any]:
    """Offers `tokens_per_s` over `streams` for `seconds` to one frontend on one core; 0: as many as
    the engine makes, and so many as would take that long at UNPACED_TOKENS_PER_S."""
    steps_per_s = tokens_per_s / streams if tokens_per_s else UNPACED_STEPS_PER_S
    max_tokens = int((tokens_per_s or UNPACED_TOKENS_PER_S) / streams * seconds)
    available = sorted(os.sched_getaffinity(0))
    frontend_core = {available[0]}
    others = set(available[1:]) or frontend_core
    port = free_port()
    engine_arguments = {
        "--steps-per-s": str(steps_per_s),
        "--port": str(port),
        "--tokenizer": str(tokenizer or smollm2_path()),
    }
    flat = [part for pair in engine_arguments.items() for part in pair]
    with program("-m", "tests.bench.paced_engine", *flat, cores=others, until="ready") as engine:
        with frontend(port, frontend_core) as serving:
            prompts = [[number] for number in range(streams)]
            before = serving.cpu_s(), engine.cpu_s()
            protocol = "sse" if sse else "flood"
            _, arrivals = ask(protocol, serving, prompts, max_tokens, others)
            used = serving.cpu_s() - before[0], engine.cpu_s() - before[1]
        engine.end_input()
        emitted = {int(number): times for number, times in json.loads(engine.line()).items()}
    if sse:
        words = word_texts(tokenizer or smollm2_path())
        arrivals = [
            tokens_of(number, texts, words)
            for number, texts in enumerate(cast(list[TextArrivals], arrivals))
        ]
    told = {"protocol": "sse" if sse else "grpc", "offered_tok_s": tokens_per_s or "unpaced"}
    return paced_result(arrivals, emitted, used) | told


def word_texts(source: Path) -> dict[int, str]:
    """The texts of the tokens that the engine emits."""
    folder, gguf = (source, None) if source.is_dir() else (source.parent, source)
    tokenizer = Tokenizer.from_files(load_tokenizer_files(folder, gguf, mode="auto"))
    ids = range(FIRST_WORD, FIRST_WORD + NUM_WORDS)
    return {token_id: tokenizer.token_bytes_of(token_id).decode() for token_id in ids}


def tokens_of(number: int, texts: TextArrivals, words: Mapping[int, str]) -> Arrivals:
    """The tokens whose texts a stream's events are; each must be the next one's, whole."""
    arrivals: Arrivals = []
    position = 0
    for at, text in texts:
        ids = []
        while text:
            token_id = expected_token(number, position)
            word = words[token_id]
            assert text.startswith(word), f"stream {number} lost or repeated token {position}"
            text = text[len(word) :]
            ids.append(token_id)
            position += 1
        arrivals.append((at, ids))
    return arrivals


def paced_result(
    arrivals: list[Arrivals], emitted: dict[int, list[float]], cpu_s: tuple[float, float]
) -> dict[str, Any]:
    """Checks every token, and sums up."""
    latencies: list[float] = []
    sizes: list[int] = []
    for number, messages in enumerate(arrivals):
        position = 0
        for at, token_ids in messages:
            sizes.append(len(token_ids))
            for token_id in token_ids:
                wanted = expected_token(number, position)
                assert token_id == wanted, f"stream {number} lost or repeated token {position}"
                latencies.append(at - emitted[number][position])
                position += 1
        assert position == len(emitted[number]), f"stream {number} ended early"
    first = min(times[0] for times in emitted.values())
    last = max(messages[-1][0] for messages in arrivals)
    # Before and after that, requests are on their way in, or have ended.
    all_run = max(times[0] for times in emitted.values())
    one_ends = min(messages[-1][0] for messages in arrivals)
    among_all = sum(len(ids) for one in arrivals for at, ids in one if all_run < at <= one_ends)
    latencies.sort()
    return {
        "test": "paced",
        "streams": len(arrivals),
        "tokens": len(latencies),
        "tok_s": round(len(latencies) / (last - first)),
        "tok_s_while_all_run": round(among_all / (one_ends - all_run)),
        "emitted_tok_s": round(
            len(latencies) / (max(times[-1] for times in emitted.values()) - first)
        ),
        "tokens_per_message_mean": round(statistics.fmean(sizes), 3),
        "tokens_per_message_max": max(sizes),
        "messages_over_2_tokens": round(sum(size > 2 for size in sizes) / len(sizes), 4),
        "latency_ms_p50": round(1e3 * latencies[len(latencies) // 2], 2),
        "latency_ms_p99": round(1e3 * latencies[len(latencies) * 99 // 100], 2),
        "latency_ms_max": round(1e3 * latencies[-1], 2),
        "frontend_core_busy": round(cpu_s[0] / (last - first), 2),
        "engine_core_busy": round(cpu_s[1] / (last - first), 2),
    }


SUBMITS_PER_S, SUBMIT_TOKENS = 50, 8192
STATS_INTERVAL_MS = 500


def run_submits(streams: int, seconds: float, tokenizer: Path | None = None) -> dict[str, Any]:
    """Step times of 8 ms steps, 2 ms of them Python, without and with a storm of long Submits and
    a stream of the engine's figures.

    The storm's requests wait behind `streams` running ones and are aborted half a second later:
    what is measured is what the wires and the inbox cost the loop, not the prefill.
    """
    port = free_port()
    engine_arguments = {
        "--steps-per-s": "125",
        "--busy-ms": "2",
        "--max-num-seqs": str(streams),
        "--port": str(port),
        "--tokenizer": str(tokenizer or smollm2_path()),
    }
    flat = [part for pair in engine_arguments.items() for part in pair]
    with program("-m", "tests.bench.paced_engine", *flat, until="ready") as engine:
        spans = asyncio.run(_submits(port, streams, seconds))
        engine.end_input()
        emitted = json.loads(engine.line())
    times = emitted["0"]
    steps = {}
    for name, (began, ended) in spans.items():
        inside = [at for at in times if began <= at <= ended]
        steps[name] = sorted(1e3 * (b - a) for a, b in itertools.pairwise(inside))
    p99 = {name: values[len(values) * 99 // 100] for name, values in steps.items()}
    return {
        "test": "submits",
        "streams": streams,
        "submits_per_s": SUBMITS_PER_S,
        "prompt_tokens": SUBMIT_TOKENS,
        "step_ms_mean": {n: round(statistics.fmean(v), 2) for n, v in steps.items()},
        "step_ms_p99": {name: round(value, 2) for name, value in p99.items()},
        "step_ms_max": {name: round(values[-1], 2) for name, values in steps.items()},
        "p99_ratio": round(p99["storm"] / p99["quiet"], 3),
    }


async def _submits(port: int, streams: int, seconds: float) -> dict[str, tuple[float, float]]:
    client = RemoteEngineClient(f"127.0.0.1:{port}")
    await client.start()
    params = SamplingParams(temperature=0.0, max_tokens=50_000, ignore_eos=True)
    running = [
        await client.submit(EngineRequest(f"run-{number}", [number], params))
        for number in range(streams)
    ]
    readers = [asyncio.create_task(_read(stream)) for stream in running]

    async def submit_and_abort(number: int) -> None:
        prompt = [number % 1000 + 1] * SUBMIT_TOKENS
        stream = await client.submit(EngineRequest(f"storm-{number}", prompt, params))
        await asyncio.sleep(0.5)
        await stream.abort()

    await asyncio.sleep(1.0)
    spans = {}
    began = time.monotonic()
    await asyncio.sleep(seconds)
    spans["quiet"] = (began, time.monotonic())
    watch = asyncio.create_task(_watch(client))
    began = time.monotonic()
    storm = []
    for number in range(int(seconds * SUBMITS_PER_S)):
        await asyncio.sleep(max(0.0, began + number / SUBMITS_PER_S - time.monotonic()))
        storm.append(asyncio.create_task(submit_and_abort(number)))
    spans["storm"] = (began, time.monotonic())
    await asyncio.gather(*storm)
    watch.cancel()
    for stream in running:
        await stream.abort()
    await asyncio.gather(*readers)
    await client.close()
    return spans


async def _watch(client: RemoteEngineClient) -> None:
    async for _ in client.watch_stats(STATS_INTERVAL_MS, with_window=True):
        pass


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


def run_smollm2(streams: int, max_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Tokens per second alone, by gRPC and by HTTP, in turn, so that slow spells hit all alike."""
    prompts = cpu_prompts()[:streams]
    port = free_port()
    model = str(smollm2_path())
    settings = {"--kv-cache-memory": str(512 << 20), "--num-threads": "2", "--port": str(port)}
    flat = [part for pair in settings.items() for part in pair]
    rates: dict[str, list[float]] = {"engine": [], "grpc": [], "http": []}
    alone = EngineProcess([sys.executable, "-m", "tests.bench.engine_pagewire", model], {})
    try:
        with (
            program("-m", "pagewire_engine.cli", model, *flat, until="is ready"),
            frontend(port) as serving,
        ):
            for number in range(rounds + 1):
                seconds, outputs = alone.generate(prompts, max_tokens, streams)
                measured = {"engine": sum(map(len, outputs)) / seconds}
                for protocol in ("grpc", "http"):
                    began, arrivals = ask(protocol, serving, prompts, max_tokens)
                    if protocol == "grpc":
                        received = [[i for _, ids in each for i in ids] for each in arrivals]
                        assert received == outputs, "the wires changed the answer"
                    last = max(messages[-1][0] for messages in arrivals)
                    count = sum(len(ids) for messages in arrivals for _, ids in messages)
                    measured[protocol] = count / (last - began)
                # The first round warms up.
                if number:
                    for way, rate in measured.items():
                        rates[way].append(rate)
    finally:
        alone.close()
    ratios = {
        way: statistics.median(a / b for a, b in zip(values, rates["engine"], strict=True))
        for way, values in rates.items()
    }
    return [
        {
            "test": "smollm2",
            "through": way,
            "streams": streams,
            "tok_s": round(statistics.median(values), 1),
            "of_engine_alone": round(ratios[way], 3),
            "rounds": [round(value, 1) for value in values],
        }
        for way, values in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("paced", "submits", "smollm2"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--rate", type=float, default=20_000, help="tokens offered a second; 0: no pacing"
    )
    parser.add_argument("--sse", action="store_true", help="the flood over HTTP, not gRPC")
    parser.add_argument("--tokenizer", type=Path, help="for the flood; default: SmolLM2's")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the flood")
    parser.add_argument("--max-tokens", type=int, default=NEW_TOKENS, help="with the real model")
    parser.add_argument("--rounds", type=int, default=3, help="with the real model")
    parser.add_argument("--serve-frontend", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_frontend is not None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
            runner.run(serve_frontend(arguments.serve_frontend))
        return
    if arguments.only in (None, "paced"):
        paced = run_paced(
            arguments.streams,
            arguments.rate,
            arguments.seconds,
            arguments.tokenizer,
            sse=arguments.sse,
        )
        print(json.dumps(paced))
    if arguments.only in (None, "submits"):
        submits = run_submits(arguments.streams, arguments.seconds, arguments.tokenizer)
        print(json.dumps(submits))
    if arguments.only in (None, "smollm2"):
        for line in run_smollm2(arguments.streams, arguments.max_tokens, arguments.rounds):
            print(json.dumps(line))


if __name__ == "__main__":
    main()
