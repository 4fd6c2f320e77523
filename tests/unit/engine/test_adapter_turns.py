"""Whose adapters' requests run: places, turns, fairness, and prefixes that are not shared."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire.errors import FailedPreconditionError, PagewireError
from pagewire_engine.adapters.registry import AdapterRegistry
from pagewire_engine.adapters.turns import TURN_STEPS, AdapterTurns
from pagewire_engine.engine import Engine
from pagewire_engine.step import StepPlan
from tests.fakes.fake_adapters import load, write_fake_adapter
from tests.unit.engine.harness import Harness, settings, submission

PROMPT = list(range(10, 22))


def names_of(registry: AdapterRegistry) -> set[str]:
    """Of the adapters that are loaded."""
    return {each.name for each in registry.adapters()}


class AdaptedHarness(Harness):
    """An engine with adapters, which are named by letters."""

    def __init__(self, folder: Path, *, max_loras: int = 1, max_cpu_loras: int = 8, **extra: Any):
        changes = {"num_blocks": 1024, "max_num_seqs": 8, "max_model_len": 512} | extra.pop(
            "changes", {}
        )
        super().__init__(settings(**changes), **extra)
        self.folder = folder
        self.max_loras = max_loras
        self.registry = AdapterRegistry(
            self.executor,
            served_model_name="base",
            max_cpu_loras=max_cpu_loras,
            tokenizer_files={},
            vocab_size=1000,
        )
        self.engine = Engine(
            self.executor,
            eos_token_ids=[1],
            settings=self.settings,
            overlaps_steps=extra.get("overlaps_steps", False),
            adapters=AdapterTurns(max_loras, self.registry),
        )
        self.registry.attach(self.fail, lambda: None)

    def fail(
        self, number: int, error: PagewireError, done: Callable[[int], None] = lambda count: None
    ) -> None:
        done(self.engine.fail_all(error, number))

    def ask(self, request_id: str, adapter: str, prompt: list[int] = PROMPT, **fields: Any) -> None:
        """Adds a request of an adapter, which is loaded if it is not."""
        asked = submission(request_id, prompt, **fields)
        if adapter:
            if adapter not in names_of(self.registry):
                load(self.registry, adapter, write_fake_adapter(self.folder / adapter, adapter))
            hold = self.registry.hold(adapter)
            asked = replace(asked, adapter=hold.number, cache_key=hold.cache_key)
        self.add(asked)

    def step(self) -> Any:
        planned = len(self.plans)
        outputs = super().step()
        for plan in self.plans[planned:]:
            assert len(self.adapters_of(plan) - {0}) <= self.max_loras
        if self.engine.awaits_adapter:
            time.sleep(0.001)
        return outputs

    def adapters_of(self, plan: StepPlan) -> set[int]:
        return {
            self.executor.sequences[part.sequence_id].new.adapter
            for part in plan.scheduled
            if part.sequence_id in self.executor.sequences
        }

    def steps_until(self, condition: Callable[[], object], most: int = 5000) -> int:
        for count in range(most):
            if condition():
                return count
            self.step()
        raise AssertionError(f"it has not come about in {most} steps")

    def has_tokens(self, request_id: str) -> bool:
        return bool(self.requests[request_id].tokens.get(0))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[AdaptedHarness]:
    harness = AdaptedHarness(tmp_path)
    yield harness
    harness.registry.close()


def test_an_adapter_that_waits_for_the_only_place_gets_it_in_bounded_time(
    harness: AdaptedHarness,
) -> None:
    """SGLang's pull request 15129: A, B, A, A, A, ... and one place."""
    harness.ask("a", "A", max_tokens=400)
    harness.step()
    harness.ask("b", "B")
    number = 0

    def another_a() -> bool:
        nonlocal number
        harness.ask(f"a{number}", "A", max_tokens=400 if number < 20 else 1)
        number += 1
        return harness.has_tokens("b")

    assert harness.steps_until(another_a, 10 * TURN_STEPS) <= 2 * TURN_STEPS + 2
    assert harness.engine.stats().num_preemptions > 0
    harness.run(20_000)
    assert all(not recorded.error for recorded in harness.requests.values())


def test_who_made_way_goes_on_where_it_was(harness: AdaptedHarness, tmp_path: Path) -> None:
    harness.ask("a", "A", max_tokens=400)
    harness.ask("a2", "A", [*PROMPT, 4], max_tokens=300, temperature=1.0, seed=5)
    harness.step()
    harness.ask("b", "B", max_tokens=20)
    harness.run()
    assert harness.engine.stats().num_preemptions == 2
    alone = AdaptedHarness(tmp_path)
    alone.ask("a", "A", max_tokens=400)
    alone.ask("a2", "A", [*PROMPT, 4], max_tokens=300, temperature=1.0, seed=5)
    alone.run()
    assert harness.tokens("a") == alone.tokens("a")
    assert harness.tokens("a2") == alone.tokens("a2")


@pytest.mark.parametrize(
    ("changes", "prompt_logprobs"), [({"enable_prefix_caching": False}, None), ({}, 0)]
)
def test_prompts_that_take_longer_than_their_turns_come_to_an_end(
    tmp_path: Path, changes: dict[str, Any], prompt_logprobs: int | None
) -> None:
    harness = AdaptedHarness(tmp_path, changes={"max_num_batched_tokens": 2, **changes})
    for name in "AB":
        prompt = [ord(name)] * 5 * TURN_STEPS
        harness.ask(name, name, prompt, max_tokens=90, prompt_logprobs=prompt_logprobs)
    # Nothing that was computed of them is found again: each is preempted once.
    harness.run(30 * TURN_STEPS)
    assert harness.engine.stats().num_preemptions > 0
    assert all(recorded.reasons for recorded in harness.requests.values())


def test_more_adapters_than_places_all_end(tmp_path: Path) -> None:
    harness = AdaptedHarness(tmp_path, max_loras=2)
    for n in range(40):
        harness.ask(str(n), "ABCDEFG"[n % 7] if n % 5 else "", max_tokens=5 + n % 9)
    harness.run()
    assert all(not recorded.error for recorded in harness.requests.values())
    assert len({tuple(harness.tokens(str(n))[0][:5]) for n in range(40)}) == 8


def test_a_flood_of_one_adapter_starves_no_other_of_the_same_tenant(tmp_path: Path) -> None:
    harness = AdaptedHarness(tmp_path, max_loras=2, changes={"max_num_seqs": 4})
    for n in range(200):
        harness.ask(f"flood{n}", "A", [*PROMPT, n], max_tokens=10)
    harness.step()
    harness.ask("small", "B")
    harness.ask("base", "")
    assert harness.steps_until(lambda: harness.has_tokens("small")) < 40
    assert harness.steps_until(lambda: harness.has_tokens("base")) < 40


def test_a_more_urgent_request_keeps_its_place(harness: AdaptedHarness) -> None:
    harness.ask("urgent", "A", max_tokens=300, priority=-1)
    harness.step()
    harness.ask("b", "B")
    harness.steps_until(lambda: harness.has_tokens("b"))
    assert harness.requests["urgent"].reasons, "it was not preempted for one less urgent"
    assert harness.engine.stats().num_preemptions == 0


def test_adapters_share_no_prefix(harness: AdaptedHarness) -> None:
    for request_id, adapter in (("1", "A"), ("2", ""), ("3", "B"), ("4", "A")):
        harness.ask(request_id, adapter)
        harness.run()
    cached = {each: harness.requests[each].ends[0].times.cached_tokens for each in "1234"}  # type: ignore[union-attr]
    assert cached == {"1": 0, "2": 0, "3": 0, "4": 8}
    assert harness.tokens("1") == harness.tokens("4") != harness.tokens("3")


def test_new_content_under_an_old_name_shares_no_prefix_with_it(harness: AdaptedHarness) -> None:
    """vLLM's issues 30931 and 42125."""
    harness.ask("old", "A")
    harness.run()
    load(harness.registry, "A", write_fake_adapter(harness.folder / "A", "new"), in_place=True)
    harness.ask("new", "A")
    harness.run()
    end = harness.requests["new"].ends[0]
    assert end.times is not None
    assert end.times.cached_tokens == 0
    assert harness.tokens("new") != harness.tokens("old")


def test_requests_that_run_keep_the_old_version(harness: AdaptedHarness) -> None:
    harness.ask("expected", "A", max_tokens=20)
    harness.run()
    harness.ask("running", "A", max_tokens=20)
    harness.step()
    load(harness.registry, "A", write_fake_adapter(harness.folder / "A", "new"), in_place=True)
    harness.ask("new", "A", max_tokens=20)
    harness.run()
    assert harness.tokens("running") == harness.tokens("expected") != harness.tokens("new")
    harness.registry.close()  # waits for what it does in the background
    assert [each.name for each in harness.registry.adapters()] == ["A"]
    assert len(harness.executor.adapters) == 1


def test_weights_that_left_host_memory_are_read_again(tmp_path: Path) -> None:
    harness = AdaptedHarness(tmp_path, max_loras=1, max_cpu_loras=1)
    for request_id, adapter in (("1", "A"), ("2", "B"), ("3", "A"), ("4", "B")):
        harness.ask(request_id, adapter)
        harness.run()
        assert len(harness.executor.adapters) == 1
    assert harness.tokens("1") == harness.tokens("3") != harness.tokens("2") == harness.tokens("4")
    assert harness.registry.num_evictions >= 3
    harness.registry.close()


def test_files_that_changed_meanwhile_fail_the_request_and_say_so(tmp_path: Path) -> None:
    harness = AdaptedHarness(tmp_path, max_loras=1, max_cpu_loras=1)
    harness.ask("1", "A")
    harness.ask("2", "B")
    harness.run()
    write_fake_adapter(tmp_path / "A", "other")
    harness.ask("3", "A")
    harness.ask("4", "")
    harness.run()
    error = harness.requests["3"].error
    assert isinstance(error, FailedPreconditionError)
    assert "load it again" in error.message
    assert harness.requests["4"].reasons
    harness.registry.close()


class Adapters(RuleBasedStateMachine):
    """Loads, updates, unloads, requests and steps in any order, with and without overlap."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.harness = AdaptedHarness(
            Path(self._folder.name),
            max_loras=2,
            max_cpu_loras=2,
            overlaps_steps=True,
            changes={"num_blocks": 24, "max_num_seqs": 4},
        )
        self.count = 0

    names = st.sampled_from("ABCD")

    @rule(name=st.sampled_from(["A", "B", "C", "D", ""]), tokens=st.integers(1, 30))
    def ask(self, name: str, tokens: int) -> None:
        self.count += 1
        self.harness.ask(f"{self.count}", name, [self.count % 3, 5, 6, 7, 8], max_tokens=tokens)

    @rule(count=st.integers(1, 20))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.count)
    @rule(number=st.integers(0, 100))
    def abort(self, number: int) -> None:
        self.harness.engine.abort(str(1 + number % self.count))

    @rule(name=names, content=st.sampled_from(["x", "y"]))
    def update(self, name: str, content: str) -> None:
        folder = write_fake_adapter(self.harness.folder / f"{name}-{content}", content)
        load(self.harness.registry, name, folder, in_place=True)

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name not in names_of(self.harness.registry):
            return
        # Overlapping steps may still use it: what fails now is let go of when they have landed.
        try:
            self.harness.registry.unload(name, ends_requests=True, timeout_s=0)
        except PagewireError:
            for _ in range(3):
                self.harness.step()
            self.harness.registry.unload(name, ends_requests=True, timeout_s=5)

    @invariant()
    def no_more_in_memory_than_may_be(self) -> None:
        registry = self.harness.registry
        leaving = {each.number for each in registry.adapters() if each.is_leaving}
        kept = registry._host.kept()
        assert sum(kept.values()) <= 2
        assert len(kept) <= 2 + len(kept.keys() & leaving)

    def teardown(self) -> None:
        harness = self.harness
        harness.run(20_000)
        for name in names_of(harness.registry):
            harness.registry.unload(name, ends_requests=False, timeout_s=5)
        harness.registry.close()
        assert not harness.registry.adapters()
        assert not harness.executor.adapters, "what nobody lists is still in memory"
        harness.engine.close()
        self._folder.cleanup()


TestAdapters = Adapters.TestCase
TestAdapters.settings = hypothesis_settings(max_examples=25, stateful_step_count=30)
