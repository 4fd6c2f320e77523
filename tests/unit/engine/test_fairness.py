"""Two tenants at 20:1 offered load: the small one is served as if the other were hardly there."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from pagewire_engine.fair_share import Amount, TenantShares
from pagewire_engine.request import Request
from tests.fakes.arrivals import Traffic, poisson, simulate
from tests.unit.engine.harness import Harness, alone, settings, submission

SECONDS = 30.0
# With the simulated step times below, prompts of 64 and answers of 32 tokens, about 25 requests a
# second are all that 8 sequences at a time can do.
CAPACITY = 25.0
LIMITS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 2048,
    "block_size": 16,
    "num_blocks": 128,
}


def bound_s(lone: Traffic, shared: Traffic) -> float:
    """Twice the lone value plus one step."""
    return 2 * lone.median_ttft_s("small") + median(shared.step_s)


@pytest.mark.parametrize(
    ("overload", "limits", "big"),
    [
        pytest.param(0.9, {}, {}, id="hardly loaded"),
        pytest.param(1.5, {}, {}, id="moderately overloaded"),
        pytest.param(8.0, {}, {}, id="heavily overloaded"),
        pytest.param(4.0, {"max_num_seqs": 64, "num_blocks": 50}, {}, id="blocks run out first"),
        pytest.param(1.0, {}, {"prompt": 1000}, id="the flood has long prompts"),
        pytest.param(1.0, {"num_blocks": 512}, {"output": 500}, id="the flood has long answers"),
    ],
)
def test_the_small_tenants_ttft_stays_under_twice_its_lone_value_plus_a_step(
    overload: float, limits: dict[str, Any], big: dict[str, int]
) -> None:
    rate = overload * CAPACITY / 21
    small = poisson("small", rate, SECONDS, prompt=64, output=32, seed=1)
    flood = poisson("big", 20 * rate, SECONDS, **({"prompt": 64, "output": 32} | big), seed=2)
    lone = simulate(small, SECONDS, **(LIMITS | limits))
    shared = simulate(small + flood, SECONDS, **(LIMITS | limits))
    alone = simulate(flood, SECONDS, **(LIMITS | limits))
    assert len(shared.ttft_s["small"]) >= 0.98 * len(small)
    assert shared.median_ttft_s("small") < bound_s(lone, shared)
    # The flood pays for it with a small part of what it would get.
    assert shared.tokens_per_s > 0.9 * alone.tokens_per_s
    if overload > 1:
        assert shared.median_ttft_s("big") > 20 * shared.median_ttft_s("small")


def test_two_floods_are_served_alike() -> None:
    """By tokens, though one tenant sends four times as many requests, and longer ones."""
    one = poisson("one", 20, SECONDS, prompt=64, output=32, seed=1)
    other = poisson("other", 80, SECONDS, prompt=128, output=64, seed=2)
    shared = simulate(one + other, SECONDS, **LIMITS)
    served = [64 + 2 * 32, 128 + 2 * 64]
    one_served, other_served = (
        cost * len(shared.ttft_s[tenant])
        for cost, tenant in zip(served, ("one", "other"), strict=True)
    )
    assert one_served == pytest.approx(other_served, rel=0.1)


def test_a_newcomer_takes_the_place_of_the_latest_of_the_flood() -> None:
    harness = Harness(settings(max_num_seqs=3))
    harness.add(*(submission(f"big-{n}", range(5), tenant="big") for n in range(4)))
    harness.step()
    harness.add(submission("small", range(5), tenant="small"))
    harness.step()
    running = [request.request_id for request in harness.engine.queues.running]
    assert running == ["big-0", "big-1", "small"]
    assert harness.engine.stats().num_preemptions == 1
    harness.run()
    assert all(len(harness.tokens(name)[0]) == 8 for name in harness.requests)


def test_nobody_gives_way_to_one_that_would_then_hold_more() -> None:
    harness = Harness(settings(max_num_seqs=2))
    harness.add(submission("a", range(5), tenant="a"), submission("b", range(5), tenant="b"))
    harness.step()
    harness.add(submission("c", range(5), tenant="c"), submission("b-2", range(5), tenant="b"))
    harness.run()
    assert harness.engine.stats().num_preemptions == 0


def test_nobody_gives_way_to_one_that_is_less_urgent() -> None:
    harness = Harness(settings(max_num_seqs=2))
    harness.add(*(submission(f"big-{n}", range(5), tenant="big") for n in range(2)))
    harness.step()
    harness.add(submission("small", range(5), tenant="small", priority=1))
    harness.run()
    assert harness.engine.stats().num_preemptions == 0


def test_a_short_prompt_of_another_tenant_is_computed_before_the_rest_of_a_long_one() -> None:
    harness = Harness(settings(max_num_batched_tokens=8))
    harness.add(submission("long", range(40), tenant="big"))
    harness.step()
    harness.add(submission("next", range(4), tenant="big"))
    harness.add(submission("short", range(4), tenant="small"))
    harness.step()
    assert harness.tokens("short")[0]
    assert not harness.requests["next"].tokens
    harness.run()


def test_out_of_blocks_the_tenant_that_holds_most_gives_way_though_another_came_later() -> None:
    harness = Harness(settings(num_blocks=9))
    harness.add(*(submission(f"big-{n}", range(7), tenant="big") for n in range(3)))
    harness.step()
    harness.add(submission("small", range(7), tenant="small"))
    preempted: set[str] = set()
    while harness.engine.has_work:
        harness.step()
        preempted |= {r.request_id for r in harness.engine.queues.waiting if r.num_preemptions}
    assert preempted
    assert "small" not in preempted


def test_what_was_preempted_is_not_charged_again() -> None:
    harness = Harness(settings(max_num_seqs=2))
    harness.add(*(submission(f"big-{n}", range(10), tenant="big") for n in range(2)))
    harness.step()
    account = harness.engine.queues.running[0].account
    harness.add(submission("small", range(5), tenant="small"))
    harness.run()
    assert harness.engine.stats().num_preemptions == 1
    # Two prompts of 10 tokens, and two answers of 8, which count twice.
    assert account.service == 2 * 10 + 2 * 2 * 8


def test_places_are_left_only_if_that_makes_room_enough() -> None:
    requests = [
        Request(
            submission(str(n), range(16), tenant="big" if n < 4 else "small"),
            seed=0,
            arrival_number=n,
            first_sequence_id=n,
            max_model_len=64,
            eos_token_ids=frozenset(),
            now=0.0,
        )
        for n in range(5)
    ]
    running, newcomer = requests[:4], requests[4]
    shares = TenantShares(running, Amount(8, 16), block_size=4)
    assert shares.places_for(newcomer, Amount(4, 0), ()) == [running[3]]
    assert shares.places_for(newcomer, Amount(4, 0), {running[3]}) == [running[2]]
    assert shares.places_for(newcomer, Amount(4, 1), ()) == [running[3]]
    assert shares.places_for(newcomer, Amount(4, 4), ()) == []
    assert shares.places_for(newcomer, Amount(-3, 4), ()) == []


def test_nobody_gives_way_for_blocks_that_would_not_come_free() -> None:
    """Eight requests share a system prompt: none of them would free more than its own end."""
    harness = Harness(settings(num_blocks=40, max_model_len=128))
    system = list(range(100, 164))  # 16 blocks
    for number in range(8):
        harness.add(
            replace(submission(f"big{number}", [*system, number], max_tokens=40), tenant="big")
        )
        harness.step()
    small = replace(submission("small", range(200, 300), max_tokens=4), tenant="small")
    harness.add(small)
    for _ in range(6):
        harness.step()
    assert harness.engine.stats().num_preemptions == 0
    assert "small" not in {request.request_id for request in harness.engine.queues.running}
    harness.run()
    assert harness.tokens("small") == alone(small)
