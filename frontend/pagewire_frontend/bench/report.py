"""A summary as a table for people, or as JSON for programs."""

from __future__ import annotations

from typing import Any

from pagewire_frontend.bench.measurement import PERCENTILES, PhaseThroughput, Summary
from pagewire_frontend.bench.settings import BenchOnlySettings

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
    "queue": "in the queue",
    "prefill": "in prefill",
    "decode": "in decode",
}
_WORKLOAD = (
    "num_prompts",
    "prompt_len",
    "output_len",
    "shared_prefix_len",
    "max_concurrency",
    "request_rate",
    "warmup",
    "seed",
)


def as_json(summary: Summary, model: str, settings: BenchOnlySettings) -> dict[str, Any]:
    """One object; times in seconds, rates a second."""
    return {
        "model": model,
        "target": settings.target,
        "workload": {name: getattr(settings, name) for name in _WORKLOAD}
        | {"max_concurrency": settings.concurrency_limit},
        "requests": summary.num_requests,
        "failed": summary.num_failed,
        "duration_s": summary.duration_s,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "cached_tokens": summary.cached_tokens,
        "preemptions": summary.preemptions,
        "requests_per_s": _per_s(summary.num_requests, summary),
        "prompt_tokens_per_s": _per_s(summary.prompt_tokens, summary),
        "output_tokens_per_s": _per_s(summary.output_tokens, summary),
        "prefill": _phase(summary.prefill),
        "decode": _phase(summary.decode),
        "latency_s": {
            name: {"mean": spread.mean} | {f"p{p}": spread.percentiles[p] for p in PERCENTILES}
            for name, spread in summary.latencies.items()
        },
    }


def as_table(summary: Summary, model: str, settings: BenchOnlySettings) -> str:
    """Lines for a terminal; times in milliseconds."""
    where = settings.target or "in this process"
    limit = settings.concurrency_limit
    in_flight = "no limit" if limit is None else f"at most {limit}"
    lines = [
        f"{model} ({where}): {summary.num_requests} requests in {summary.duration_s:.2f} s, "
        f"{in_flight} in flight; {summary.num_failed} failed",
        f"{summary.prompt_tokens} prompt tokens ({summary.cached_tokens} cached), "
        f"{summary.output_tokens} output tokens, {summary.preemptions} preemptions",
        "",
        f"{'throughput':<24}{'tok/s':>12}{'tokens':>12}{'seconds':>12}",
        _row("prefill", summary.prefill),
        _row("decode", summary.decode),
        _row("output, end to end", PhaseThroughput(summary.output_tokens, summary.duration_s)),
        f"{'requests/s':<24}{_per_s(summary.num_requests, summary):>12.2f}",
        "",
        f"{'latency, ms':<24}{'mean':>12}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES),
    ]
    for name, spread in summary.latencies.items():
        values = (spread.mean, *(spread.percentiles[p] for p in PERCENTILES))
        lines.append(f"{_NAMES[name]:<24}" + "".join(f"{1000 * value:>12.2f}" for value in values))
    return "\n".join(lines)


def _row(name: str, phase: PhaseThroughput) -> str:
    return f"{name:<24}{phase.tokens_per_s:>12.1f}{phase.tokens:>12}{phase.seconds:>12.2f}"


def _phase(phase: PhaseThroughput) -> dict[str, float]:
    return {
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "tokens_per_s": phase.tokens_per_s,
    }


def _per_s(count: int, summary: Summary) -> float:
    return count / summary.duration_s if summary.duration_s > 0 else 0.0
