"""Time to the first token of requests that share a long beginning, with and without the cache.

Usage: python tests/bench/prefix_cache.py [--model MODEL] [--requests N] [--prefix N] [--suffix N]

One request warms up; then the others come, first one after another, then all at once, each time
once with the prefix cache and once without, on one loaded model. One line of JSON each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a file, too
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.build import assemble_engine, limit_threads
from pagewire_engine.engine import Engine
from pagewire_engine.executor.base import Executor
from pagewire_engine.submission import Submission
from tests.fakes.engine_run import steps_to_end


def first_token_times(engine: Engine, submissions: list[Submission]) -> list[float]:
    """Submits all at once; seconds until each has its first token."""
    began = time.perf_counter()
    for submission in submissions:
        engine.add(submission)
    seconds: dict[str, float] = {}
    for outputs in steps_to_end(engine):
        now = time.perf_counter()
        for output in outputs.sequences:
            seconds.setdefault(output.request_id, now - began)
    return list(seconds.values())


def measure(
    executor: Executor, config: EngineConfig, prompts: list[list[int]], *, at_once: bool
) -> dict[str, Any]:
    """Warms up with the first prompt, and times the others."""
    engine = assemble_engine(executor, config, ())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
    first, *others = [Submission(str(n), prompt, params) for n, prompt in enumerate(prompts)]
    first_token_times(engine, [first])
    if at_once:
        seconds = first_token_times(engine, others)
    else:
        seconds = [first_token_times(engine, [submission])[0] for submission in others]
    return {
        "cache": config.enable_prefix_caching,
        "at_once": at_once,
        "requests": len(others),
        "ttft_ms_median": round(1e3 * statistics.median(seconds), 1),
        "ttft_ms_max": round(1e3 * max(seconds), 1),
        "cached_tokens": engine.stats().prefix_cache_hits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="default: the embedded model, SmolLM2-135M-Instruct")
    parser.add_argument("--requests", type=int, default=31)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all share")
    parser.add_argument("--suffix", type=int, default=32, help="tokens of each one's own")
    arguments = parser.parse_args()
    if arguments.model is None:
        from pagewire_frontend.model_download import smollm2_path

        arguments.model = str(smollm2_path())
    limit_threads(None)
    from pagewire_engine.executor.single_process import SingleProcessExecutor
    from pagewire_engine.model_files import resolve_model

    config = EngineConfig(model=arguments.model, kv_cache_memory=512 << 20)
    executor = SingleProcessExecutor(config, resolve_model(config))
    dice = random.Random(0)
    vocab_size = executor.info().vocab_size

    def ids(count: int) -> list[int]:
        return [dice.randrange(vocab_size) for _ in range(count)]

    for at_once in (False, True):
        medians = {}
        for cache in (False, True):
            prefix = ids(arguments.prefix)
            prompts = [prefix + ids(arguments.suffix) for _ in range(arguments.requests + 1)]
            settings = config.model_copy(update={"enable_prefix_caching": cache})
            result = measure(executor, settings, prompts, at_once=at_once)
            medians[cache] = result["ttft_ms_median"]
            print(json.dumps(result), flush=True)
        ratio = round(medians[False] / medians[True], 2)
        print(json.dumps({"at_once": at_once, "ttft_without_over_with": ratio}), flush=True)
    executor.shutdown()


if __name__ == "__main__":
    main()
