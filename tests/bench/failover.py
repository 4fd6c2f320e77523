"""What an engine's death costs the streams that it carries.

Usage: python -m tests.bench.failover [--model MODEL] [--tokens N] [--rounds N]

Thirty-two streams of all kinds run through `pagewire serve`; when each has 20 to 80% of its tokens,
the engine is killed with -9, and the supervisor starts it again. Each stream's pause is the time
from the kill to its next token: until the engine is ready again (the restart), and from there on
(the session, the resubmission and the recomputation of what the streams had). One line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pagewire_frontend.model_download import smollm2_path
from pagewire_frontend.probes import ENGINE_SERVICE, GrpcProbe
from tests.fakes.real_processes import RealServe
from tests.faults.mixed_streams import Answer, Case, mixed_cases
from tests.faults.streams_in_the_middle import (
    EARLIEST,
    LATEST,
    CaughtStreams,
    TooLateError,
)

PIRATE = Path(__file__).resolve().parents[1] / "adapters" / "pirate"
_POLL_S = 0.02


@dataclass
class TimedAnswer(Answer):
    """Remembers when tokens came."""

    times: list[float] = field(default_factory=list)

    def add(self, *new: Any) -> None:
        super().add(*new)
        self.times.append(time.monotonic())


@dataclass(frozen=True)
class Death:
    """One death of the engine.

    Attributes:
        restart_s: from the kill until the engine was ready.
        pauses_s: of each stream, from the kill to its next token.
        lost: streams whose answer was not the undisturbed one.
        carried_over: streams that went on in the next life.
    """

    restart_s: float
    pauses_s: list[float]
    lost: int
    carried_over: int


async def ready_at(engine: psutil.Process) -> float:
    """When the engine serves, by health checks at its port."""
    port = next(flag for flag in engine.cmdline() if flag.startswith("--port=")).split("=")[1]
    probe = GrpcProbe(f"127.0.0.1:{port}")
    while await probe.is_serving(ENGINE_SERVICE):  # noqa: ASYNC110  # another process
        await asyncio.sleep(_POLL_S)
    while not await probe.is_serving(ENGINE_SERVICE):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    now = time.monotonic()
    await probe.close()
    return now


async def kill_once(serve: RealServe, cases: list[Case], expected: dict[str, Answer]) -> Death:
    """Kills the engine in the middle of the streams."""
    while True:
        caught = CaughtStreams(cases, serve.http, serve.grpc, TimedAnswer)
        try:
            await caught.reach_the_middle(expected)
        except TooLateError:
            continue
        engine = serve.engine()
        readiness = asyncio.create_task(ready_at(engine))
        await asyncio.sleep(0)
        shares = caught.shares(expected)
        if min(shares) < EARLIEST or max(shares) > LATEST:
            await caught.drop()
            readiness.cancel()
            continue
        engine.kill()
        killed = time.monotonic()
        answers = await caught.answers
        lost = 0
        pauses: list[float] = []
        for name, answer in answers.items():
            try:
                answer.assert_equals(expected[name], name)
            except AssertionError as error:
                print(error)
                lost += 1
        carried_over = sum(answer.resumptions > 0 for answer in answers.values())
        restart_s = await readiness - killed
        for answer in answers.values():
            assert isinstance(answer, TimedAnswer)
            # Not what was on its way when the engine died.
            pauses += [at - killed for at in answer.times if at - killed > restart_s / 2][:1]
        return Death(restart_s, pauses, lost, carried_over)


async def measure(serve: RealServe, cases: list[Case], rounds: int) -> dict[str, Any]:
    """Undisturbed answers first, then the deaths."""
    expected = await CaughtStreams(cases, serve.http, serve.grpc).answers
    deaths = [await kill_once(serve, cases, expected) for _ in range(rounds)]
    pauses = [pause for death in deaths for pause in death.pauses_s]
    rests = [pause - death.restart_s for death in deaths for pause in death.pauses_s]
    return {
        "deaths": rounds,
        "streams": rounds * len(cases),
        "carried_over": sum(death.carried_over for death in deaths),
        "lost": sum(death.lost for death in deaths),
        "kill_to_next_token_s": _spread(pauses),
        "restart_s": _spread([death.restart_s for death in deaths]),
        "ready_to_next_token_s": _spread(rests),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="default: the embedded SmolLM2")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = arguments.model or str(smollm2_path())
    adapter = [] if arguments.model else ["--enable-lora", f"--lora-modules=pirate={PIRATE}"]
    names = ("pirate", "pirate") if adapter else ("", "")
    cases = mixed_cases(arguments.tokens, names)
    flags = (model, "--dtype=float32", "--max-model-len=1024", *adapter)
    with RealServe(*flags) as serve:
        figures = asyncio.run(measure(serve, cases, arguments.rounds))
    described = {"model": Path(model).name, "tokens": arguments.tokens}
    print(json.dumps(described | figures), flush=True)


if __name__ == "__main__":
    main()
