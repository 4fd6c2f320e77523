"""What the engine costs beside the model: scheduling a step of decodes and booking its tokens.

Usage: python -m tests.bench.scheduler_cost [--running 64 256 1024] [--steps 200] [--tenants 2]

One thread, a model that answers at once and is not counted, the heap frozen as engine-service does
it. One line of JSON for each number of running requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from pagewire_engine.engine import Engine
from pagewire_engine.queues import SchedulerSettings
from tests.fakes.fake_executor import FreeExecutor
from tests.unit.engine.harness import submission

_PROMPT_TOKENS = 100


def engine_of(running: int, executor: FreeExecutor, steps: int, tenants: int) -> Engine:
    """An engine in which so many requests decode, and go on to for as many steps; with several
    tenants, of each of which one waits for a place."""
    engine = Engine(
        executor,
        eos_token_ids=[1],
        settings=SchedulerSettings(
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            block_size=16,
            num_blocks=running * 80,
        ),
    )
    for number in range(running):
        # Of unlike lengths, so that they do not all take a new block in the same step.
        length = _PROMPT_TOKENS + number % 16
        tenant, max_tokens = str(number % tenants), 2 * steps + 500
        engine.add(submission(str(number), range(length), max_tokens=max_tokens, tenant=tenant))
    while engine.stats().step_decode_tokens < running:
        engine.step()
    for number in range(tenants if tenants > 1 else 0):
        engine.add(submission(f"waits {number}", range(_PROMPT_TOKENS), tenant=str(number)))
    return engine


def measure(running: int, steps: int, tenants: int) -> dict[str, float | int | str]:
    """Milliseconds of processor time a step."""
    executor = FreeExecutor()
    engine = engine_of(running, executor, steps, tenants)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        executor.seconds, begun = 0.0, time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - begun - executor.seconds))
    gc.unfreeze()
    return {
        "test": "scheduler_cost",
        "running": running,
        "tenants": tenants,
        "ms_median": round(statistics.median(times), 3),
        "ms_p90": round(statistics.quantiles(times, n=10)[-1], 3),
        "us_per_request": round(1e3 * statistics.median(times) / running, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tenants", type=int, default=1)
    arguments = parser.parse_args()
    for running in arguments.running:
        print(json.dumps(measure(running, arguments.steps, arguments.tenants)), flush=True)


if __name__ == "__main__":
    main()
