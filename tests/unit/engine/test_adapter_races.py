"""Adapters that are loaded, fetched and unloaded at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagewire.errors import DeadlineExceededError, PagewireError
from pagewire_engine.adapters.description import AdapterDescription, AdapterFolder
from pagewire_engine.adapters.registry import AdapterRegistry
from tests.fakes.fake_adapters import load, write_fake_adapter
from tests.fakes.fake_executor import FakeExecutor

WAIT_S = 20.0


class Workers(FakeExecutor):
    """Their `on_load` is called where a load is under way."""

    on_load: Callable[[], object] = staticmethod(lambda: None)

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        self.on_load()
        return super().load_adapter(number, folder)


class Fixture:
    """A registry with one place in host memory; "a" had to leave it for "b"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers = Workers(64, 4, 1000)
        self.registry = AdapterRegistry(
            self.workers,
            served_model_name="base",
            max_cpu_loras=1,
            tokenizer_files={},
            vocab_size=1000,
        )
        self.on_fail: Callable[[], object] = lambda: None
        self._wakes = threading.Semaphore(0)
        self.registry.attach(self._fail, self._wakes.release)
        self.number = load(self.registry, "a", write_fake_adapter(folder / "a", "a")).number
        load(self.registry, "b", write_fake_adapter(folder / "b", "b"))

    def _fail(self, number: int, error: PagewireError, done: Callable[[int], None]) -> None:
        self.on_fail()
        done(0)

    def wait_for_fetch(self) -> None:
        assert self._wakes.acquire(timeout=WAIT_S)

    def drain(self) -> None:
        """Returns when what was left to the background is done."""
        self.registry._background.submit(lambda: None).result(WAIT_S)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    fixture = Fixture(tmp_path)
    yield fixture
    fixture.registry.close()


def test_weights_that_come_after_their_adapter_was_unloaded_are_let_go(fixture: Fixture) -> None:
    registry = fixture.registry
    fixture.workers.on_load = lambda: registry.unload("a", ends_requests=True)
    registry.want(fixture.number)
    fixture.wait_for_fetch()
    assert fixture.number not in fixture.workers.adapters
    assert [each.name for each in registry.adapters()] == ["b"]


def test_who_comes_while_a_failure_is_told_gets_another_attempt(fixture: Fixture) -> None:
    def on_fail() -> None:
        write_fake_adapter(fixture.folder / "a", "a")
        fixture.registry.want(fixture.number)

    fixture.on_fail = on_fail
    write_fake_adapter(fixture.folder / "a", "changed")
    fixture.registry.want(fixture.number)
    fixture.wait_for_fetch()
    fixture.wait_for_fetch()
    assert fixture.registry.is_ready(fixture.number)


def test_a_version_replaced_under_an_unload_that_gives_up_leaves_all_the_same(
    fixture: Fixture,
) -> None:
    registry = fixture.registry
    reading, may_go_on = threading.Event(), threading.Event()

    def on_load() -> None:
        reading.set()
        assert may_go_on.wait(WAIT_S)

    def replace() -> None:
        load(registry, "a", write_fake_adapter(fixture.folder / "new", "new"), in_place=True)

    def let_it_be_replaced() -> None:
        may_go_on.set()
        replacing.join(WAIT_S)

    registry.hold("a")
    fixture.workers.on_load, fixture.on_fail = on_load, let_it_be_replaced
    replacing = threading.Thread(target=replace)
    replacing.start()
    assert reading.wait(WAIT_S)
    with pytest.raises(DeadlineExceededError):
        registry.unload("a", ends_requests=True, timeout_s=0)
    registry.release(fixture.number)
    fixture.drain()
    assert fixture.number not in [each.number for each in registry.adapters()]
    registry.hold("a")
