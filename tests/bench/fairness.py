"""Two tenants at 20:1 offered load on a real engine: does the flood hold up the small tenant?

    python -m tests.bench.fairness [--model M] [--overload 3] [--seconds 40]

Measures what the engine can do of the flood's requests, then lets the small tenant come alone, then
both, by the clock. Prints one JSON line: among others the median TTFT of the small tenant alone and
beside the flood, the bound (twice the lone value plus one median step), and whether it holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pagewire.config import EngineConfig
from pagewire_engine.build import BuiltEngine, build_engine
from pagewire_engine.engine import Engine
from tests.fakes.arrivals import Arrival, poisson

# The flood offers twenty times what the small tenant does.
_FLOOD = 20


@dataclass
class Run:
    """What was seen in one run: seconds to the first token by tenant, seconds of each step."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    num_finished: int = 0
    seconds: float = 0.0


def run(engine: Engine, arrivals: Sequence[Arrival], seconds: float) -> Run:
    """Lets requests come by the clock, and aborts what has not ended after `seconds`."""
    seen, arrived = Run(), {}
    coming = sorted(arrivals, key=lambda arrival: arrival.time_s, reverse=True)
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds:
        while coming and coming[-1].time_s <= now:
            arrival = coming.pop()
            arrived[arrival.submission.request_id] = arrival
            engine.add(arrival.submission)
        if not engine.has_work:
            if not coming:
                break
            time.sleep(max(0.0, coming[-1].time_s - now))
            continue
        outputs = engine.step()
        ended = time.monotonic() - started
        seen.step_s.append(ended - now)
        for output in outputs.sequences:
            arrival = arrived[output.request_id]
            if output.start == 0 and output.token_ids:
                waited = seen.ttft_s.setdefault(arrival.submission.tenant, [])
                waited.append(ended - arrival.time_s)
            seen.num_finished += output.finish_reason is not None
    seen.seconds = time.monotonic() - started
    for request_id in arrived:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return seen


def measure(built: BuiltEngine, arguments: argparse.Namespace) -> dict[str, object]:
    """The whole comparison, as the JSON line's fields."""
    seconds, engine = arguments.seconds, built.engine
    lengths = {
        "prompt": arguments.prompt,
        "output": arguments.output,
        "vocab_size": built.info.vocab_size,
    }
    at_once = [
        Arrival(0.0, arrival.submission) for arrival in poisson("big", 500, 1.0, **lengths, seed=1)
    ]
    full = run(engine, at_once, seconds)
    if full.num_finished == 0:
        raise SystemExit("nothing ended in time: give it more --seconds, or shorter requests")
    capacity = full.num_finished / full.seconds
    rate = arguments.overload * capacity / (_FLOOD + 1)
    small = poisson("small", rate, seconds, **lengths, seed=2)
    flood = poisson("big", _FLOOD * rate, seconds, **lengths, seed=3)
    lone = run(engine, small, seconds)
    preemptions = engine.stats().num_preemptions
    shared = run(engine, [*small, *flood], seconds)
    if "small" not in lone.ttft_s or "small" not in shared.ttft_s:
        raise SystemExit("the small tenant has sent nothing: give it more --seconds")
    lone_s, shared_s = (median(each.ttft_s["small"]) for each in (lone, shared))
    bound_s = 2 * lone_s + median(shared.step_s)
    return {
        "model": built.served_model_name,
        "overload": arguments.overload,
        "capacity_requests_per_s": round(capacity, 3),
        "requests_of_small": len(shared.ttft_s["small"]),
        "lone_ttft_ms": round(1e3 * lone_s, 1),
        "shared_ttft_ms": round(1e3 * shared_s, 1),
        "step_ms": round(1e3 * median(shared.step_s), 1),
        "bound_ms": round(1e3 * bound_s, 1),
        "holds": shared_s < bound_s,
        "flood_ttft_ms": round(1e3 * median(shared.ttft_s["big"]), 1),
        "preemptions": engine.stats().num_preemptions - preemptions,
        "finished_per_s": round(shared.num_finished / shared.seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded model, SmolLM2-135M-Instruct")
    parser.add_argument("--overload", type=float, default=3.0, help="offered load over capacity")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each of the three runs")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=32, help="output tokens")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.model is None:
        from pagewire_frontend.model_download import smollm2_path

        arguments.model = str(smollm2_path())
    config = EngineConfig(
        model=arguments.model,
        max_num_seqs=arguments.max_num_seqs,
        max_waiting_requests=1_000_000,
        skip_tokenizer_init=True,
    )
    built = build_engine(config, lambda line: print(line, file=sys.stderr))
    try:
        print(json.dumps(measure(built, arguments)))
    finally:
        built.shutdown()


if __name__ == "__main__":
    main()
