"""Which engine a request goes to: where its beginning is, unless that one has too much to do."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pagewire_frontend.engine_client.routing import (
    LOAD_FACTOR,
    LOAD_SLACK,
    TOKENS_A_REQUEST,
    Candidate,
    PromptKeys,
    Router,
)

NAMES = [f"10.0.0.{number}:50061" for number in range(1, 6)]
prompts = st.lists(st.integers(0, 3), min_size=1, max_size=200)
fleets = st.dictionaries(
    st.sampled_from(NAMES), st.floats(0, 1000, allow_nan=False), min_size=1
).map(lambda loads: [Candidate(name, load) for name, load in loads.items()])
routes = st.lists(st.tuples(prompts, st.sampled_from(NAMES)), max_size=8)


def routed(history: list[tuple[list[int], str]]) -> Router:
    router = Router()
    for prompt, name in history:
        router.note(PromptKeys.of(prompt), name)
    return router


def idle(*names: str) -> list[Candidate]:
    return [Candidate(name, 0.0) for name in names]


@given(routes, prompts, fleets)
def test_the_choice_is_within_the_bound_and_none_is_cheaper(
    history: list[tuple[list[int], str]], prompt: list[int], fleet: list[Candidate]
) -> None:
    router, keys = routed(history), PromptKeys.of(prompt)
    chosen = next(one for one in fleet if one.name == router.choose(keys, fleet))
    mean = sum(one.load for one in fleet) / len(fleet)
    least = min(one.load for one in fleet)
    bound = max(least, LOAD_FACTOR * mean + LOAD_SLACK)
    assert chosen.load <= bound
    cached = router.cached_tokens(keys)

    def cost(one: Candidate) -> float:
        return one.load + (len(prompt) - cached.get(one.name, 0)) / TOKENS_A_REQUEST

    assert all(cost(chosen) <= cost(one) for one in fleet if one.load <= bound)


@given(routes, prompts, fleets, st.randoms())
def test_the_order_of_the_engines_says_nothing(
    history: list[tuple[list[int], str]],
    prompt: list[int],
    fleet: list[Candidate],
    random: Random,
) -> None:
    router, keys = routed(history), PromptKeys.of(prompt)
    shuffled = list(fleet)
    random.shuffle(shuffled)
    assert router.choose(keys, fleet) == router.choose(keys, shuffled)


@given(prompts, st.sampled_from(NAMES))
def test_an_engine_that_goes_changes_nothing_for_requests_of_the_others(
    prompt: list[int], gone: str
) -> None:
    router, keys = Router(), PromptKeys.of(prompt)
    before = router.choose(keys, idle(*NAMES))
    after = router.choose(keys, idle(*(name for name in NAMES if name != gone)))
    assert after == before or before == gone


@given(prompts, prompts)
def test_what_is_known_of_a_prompt_is_a_beginning_that_went_there(
    known: list[int], asked: list[int]
) -> None:
    router = routed([(known, NAMES[0])])
    cached = router.cached_tokens(PromptKeys.of(asked)).get(NAMES[0], 0)
    shared = next(
        (i for i, pair in enumerate(zip(known, asked, strict=False)) if pair[0] != pair[1]),
        min(len(known), len(asked)),
    )
    assert cached <= shared
    assert shared < 16 or cached > shared / 2


def test_requests_that_begin_alike_go_to_one_engine_though_it_has_more_to_do() -> None:
    shared = list(range(1024))
    router = routed([(shared, NAMES[3])])
    fleet = [Candidate(name, 15.0 if name == NAMES[3] else 0.0) for name in NAMES]
    assert router.choose(PromptKeys.of([*shared, 7]), fleet) == NAMES[3]
    # Another adapter computes other blocks of the same tokens.
    assert router.choose(PromptKeys.of([*shared, 7], adapter="a"), fleet) != NAMES[3]
    # So does what is short: to compute it anew is cheaper than to wait.
    assert router.choose(PromptKeys.of(shared[:40]), fleet) != NAMES[3]


def test_an_overloaded_engine_gets_nothing_however_much_it_has_cached() -> None:
    shared = list(range(30_000))
    router = routed([(shared, NAMES[0])])
    fleet = [Candidate(NAMES[0], 60.0), Candidate(NAMES[1], 0.0)]
    assert router.choose(PromptKeys.of(shared), fleet) == NAMES[1]


def test_different_prompts_are_spread_over_idle_engines() -> None:
    router = Router()
    got = Counter(
        router.choose(PromptKeys.of([number, 5, 6] * 10), idle(*NAMES)) for number in range(500)
    )
    assert len(got) == len(NAMES)
    assert min(got.values()) > 50


def test_memory_is_bounded_and_keeps_what_was_used_last() -> None:
    router = Router(most_keys=100)
    common = PromptKeys.of([1] * 64)
    for number in range(500):
        router.note(PromptKeys.of([number + 2] * 64), NAMES[0])
        router.note(common, NAMES[1])
    assert len(router) <= 100
    assert router.cached_tokens(common) == {NAMES[1]: 64}


def test_an_engine_whose_cache_is_gone_is_forgotten() -> None:
    prompt = PromptKeys.of([1] * 64)
    router = Router()
    router.note(prompt, NAMES[0])
    router.note(prompt, NAMES[1])
    router.forget(NAMES[0])
    assert router.cached_tokens(prompt) == {NAMES[1]: 64}
    router.forget(NAMES[1])
    assert len(router) == 0


def test_frontends_agree_on_where_an_unknown_prompt_goes() -> None:
    program = (
        "from pagewire_frontend.engine_client.routing import *\n"
        f"fleet = [Candidate(name, 0.0) for name in {NAMES}]\n"
        "print([Router().choose(PromptKeys.of([n, 2, 3] * 40, 'a'), fleet) for n in range(20)])"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()
    router = Router()
    here = [router.choose(PromptKeys.of([n, 2, 3] * 40, "a"), idle(*NAMES)) for n in range(20)]
    assert told == str(here)
