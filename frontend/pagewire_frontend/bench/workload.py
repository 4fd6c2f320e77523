"""A seeded workload: the same settings give the same prompts on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire_frontend.bench.settings import BenchOnlySettings, parse_lengths

# Tokenised, these give ids that every model with a tokenizer accepts.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to make.

    Attributes:
        token_ids: the prompt.
        output_len: tokens to produce.
        arrival_s: when to send it, in seconds since the start; no sooner.
    """

    token_ids: list[int]
    output_len: int
    arrival_s: float


def make_workload(settings: BenchOnlySettings, pool: Sequence[int]) -> list[BenchRequest]:
    """The requests, first those of the warm-up.

    Args:
        settings: lengths, numbers, rate and seed.
        pool: token ids that prompts are drawn from.
    """
    rng = random.Random(settings.seed)
    prefix = rng.choices(pool, k=settings.shared_prefix_len)
    prompt_len, output_len = parse_lengths(settings.prompt_len), parse_lengths(settings.output_len)
    requests: list[BenchRequest] = []
    arrival_s = 0.0
    for number in range(settings.warmup + settings.num_prompts):
        own = rng.choices(pool, k=rng.randint(*prompt_len))
        if settings.request_rate is not None and number > settings.warmup:
            arrival_s += rng.expovariate(settings.request_rate)
        requests.append(BenchRequest(prefix + own, rng.randint(*output_len), arrival_s))
    return requests
