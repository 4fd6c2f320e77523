"""What was measured of each request, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagewire.outputs import RequestTimes

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestMeasurement:
    """One request that ran to its end; times in seconds of one monotonic clock.

    Attributes:
        prompt_tokens: length of its prompt.
        sent_at: when it was handed over; at a request rate, when it was due.
        arrivals: when tokens came, and how many.
        ended_at: when its end was known.
        times: what the engine told of it.
    """

    prompt_tokens: int
    sent_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_at(self) -> float:
        return self.arrivals[0][0] if self.arrivals else self.ended_at

    @property
    def last_token_at(self) -> float:
        return self.arrivals[-1][0] if self.arrivals else self.ended_at

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_at - self.sent_at

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after those that came first; None where no more came."""
        later = self.output_tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.last_token_at - self.first_token_at) / later if later else None

    @property
    def decode_span(self) -> tuple[float, float]:
        """When it decoded: as long as the engine says; first tokens may arrive together."""
        return self.last_token_at - self.times.decode_s, self.last_token_at

    @property
    def prefill_span(self) -> tuple[float, float]:
        """When its prompt was computed: until decode began, as long as the engine says."""
        start, _ = self.decode_span
        return start - self.times.prefill_s, start

    def inter_token_s(self) -> Iterable[float]:
        """Time before each token after the first; those that come together share it."""
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield from [(at - before) / count] * count


@dataclass(frozen=True, slots=True)
class Spread:
    """A latency over all requests, in seconds."""

    mean: float
    percentiles: dict[int, float]


@dataclass(frozen=True, slots=True)
class PhaseThroughput:
    """A phase over the whole run.

    Attributes:
        tokens: computed in it.
        seconds: in which at least one request was in the phase.
    """

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What all requests come to.

    Attributes:
        num_requests, num_failed: ran to their ends, and failed.
        duration_s: from the first request's sending to the last one's end.
        prompt_tokens, output_tokens, cached_tokens, preemptions: of all.
        prefill: prompt tokens that no cache held, over the time of prefill. A step may do both, and
            then counts for both.
        decode: tokens after the first, over the time of decode.
        latencies: by name; those without a value in any request are absent.
    """

    num_requests: int
    num_failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    prefill: PhaseThroughput
    decode: PhaseThroughput
    latencies: dict[str, Spread]


def summarize(measured: Sequence[RequestMeasurement], num_failed: int) -> Summary:
    """Adds the requests up."""
    start = min((one.sent_at for one in measured), default=0.0)
    end = max((one.ended_at for one in measured), default=0.0)
    cached = sum(one.times.cached_tokens for one in measured)
    prompt_tokens = sum(one.prompt_tokens for one in measured)
    prefills = [one.prefill_span for one in measured]
    decodes = [one.decode_span for one in measured]
    latencies = {
        "ttft": [one.ttft_s for one in measured],
        "tpot": [one.tpot_s for one in measured if one.tpot_s is not None],
        "itl": [gap for one in measured for gap in one.inter_token_s()],
        "e2e": [one.e2e_s for one in measured],
        "queue": [one.times.queue_s for one in measured],
        "prefill": [one.times.prefill_s for one in measured],
        "decode": [one.times.decode_s for one in measured],
    }
    return Summary(
        num_requests=len(measured),
        num_failed=num_failed,
        duration_s=end - start,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(one.output_tokens for one in measured),
        cached_tokens=cached,
        preemptions=sum(one.times.preemptions for one in measured),
        prefill=PhaseThroughput(prompt_tokens - cached, covered_s(prefills)),
        decode=PhaseThroughput(
            sum(max(0, one.output_tokens - 1) for one in measured),
            covered_s(decodes),
        ),
        latencies={name: _spread(values) for name, values in latencies.items() if values},
    )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -math.inf
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total


def _spread(values: Sequence[float]) -> Spread:
    ranked = sorted(values)
    return Spread(
        mean=sum(ranked) / len(ranked),
        percentiles={p: ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in PERCENTILES},
    )
