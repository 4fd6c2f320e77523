"""Requests that arrive by the clock, at an engine whose steps take simulated time."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pagewire.sampling_params import SamplingParams
from pagewire_engine.engine import Engine
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.step import StepPlan
from pagewire_engine.submission import Submission
from tests.fakes.fake_executor import FakeExecutor


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds."""

    time_s: float
    submission: Submission


@dataclass
class Traffic:
    """What a simulated run showed.

    Attributes:
        ttft_s: seconds from arrival to first token, by tenant.
        step_s: what each step took.
        num_preemptions: in all.
        utilisation: output tokens a simulated second.
    """

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    tokens_per_s: float = 0.0

    def median_ttft_s(self, tenant: str) -> float:
        return median(self.ttft_s[tenant])


def poisson(
    tenant: str,
    rate: float,
    duration_s: float,
    *,
    prompt: int,
    output: int,
    seed: int,
    vocab_size: int = 1000,
) -> list[Arrival]:
    """Arrivals of a Poisson process of `rate` requests a second."""
    source, time_s, arrivals = random.Random(f"{tenant} {seed}"), 0.0, []
    while (time_s := time_s + source.expovariate(rate)) < duration_s:
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=output, ignore_eos=True)
        request_id = f"{tenant}-{len(arrivals)}"
        # Prompts that share no prefix.
        tokens = [source.randrange(2, vocab_size) for _ in range(prompt)]
        arrivals.append(Arrival(time_s, Submission(request_id, tokens, params, tenant=tenant)))
    return arrivals


def simulate(
    arrivals: Iterable[Arrival],
    duration_s: float,
    *,
    step_base_s: float = 0.005,
    token_s: float = 0.0002,
    **settings: Any,
) -> Traffic:
    """Runs an engine on the arrivals of `duration_s` seconds. A step takes a fixed time and more
    for each of its tokens, as a model's would. What is unfinished then is not waited for."""
    now, traffic = 0.0, Traffic()

    def pass_time(plan: StepPlan) -> None:
        nonlocal now
        seconds = step_base_s + token_s * sum(entry.num_tokens for entry in plan.scheduled)
        traffic.step_s.append(seconds)
        now += seconds

    limits = SchedulerSettings(**settings)
    executor = FakeExecutor(limits.num_blocks, limits.block_size, on_execute=pass_time)
    engine = Engine(executor, eos_token_ids=[1], settings=limits, clock=lambda: now)
    coming = sorted(arrivals, key=lambda arrival: arrival.time_s, reverse=True)
    arrived: dict[str, Arrival] = {}
    while now < duration_s:
        while coming and coming[-1].time_s <= now:
            arrival = coming.pop()
            arrived[arrival.submission.request_id] = arrival
            engine.add(arrival.submission)
        if not engine.has_work:
            if not coming:
                break
            now = coming[-1].time_s
            continue
        for output in engine.step().sequences:
            if output.start == 0:
                arrival = arrived[output.request_id]
                waited = traffic.ttft_s.setdefault(arrival.submission.tenant, [])
                waited.append(now - arrival.time_s)
    stats = engine.stats()
    traffic.num_preemptions = stats.num_preemptions
    traffic.tokens_per_s = stats.num_generation_tokens / now
    return traffic
