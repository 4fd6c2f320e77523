"""A real browser looks at the engine, where the server allows it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.ui.browser import answer, send, take_pictures
from tests.ui.fake_inference import FakeInference
from tests.ui.fake_observability import FakeObservability


@pytest.fixture
def engine(frontend_port: int) -> Iterator[FakeObservability]:
    engine = FakeObservability()
    fake = FakeInference(engine)
    fake.start(frontend_port)
    yield engine
    fake.stop()


def figure(page: Page, name: str) -> str:
    return page.locator(f'#engine [data-figure="{name}"] b').inner_text()


def test_the_tab_draws_queues_blocks_and_step_and_follows_the_engine(
    page: Page, engine: FakeObservability
) -> None:
    page.reload()
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine svg").first).to_be_visible()
    assert figure(page, "running") == "2"
    assert figure(page, "waiting") == "3"
    assert figure(page, "blocks held") == "8 %"
    assert figure(page, "prefix cache hits") == "25 %"
    assert figure(page, "last step") == "12.5 ms"
    grid = page.locator('#engine svg[aria-label^="300 blocks"]')
    cells = {
        name: grid.locator(f"path.{name}").get_attribute("d").count("M")
        for name in ("free", "held", "shared", "cached")
    }
    assert cells == {"free": 246, "held": 20, "shared": 4, "cached": 30}
    expect(page.locator("#engine")).to_contain_text("Step 42: decodes 1, prefill chunks 1")
    expect(page.locator("#engine")).to_contain_text("33 tokens of request 2")
    expect(page.locator("#engine table")).to_contain_text("77")
    # What swapped requests hold is drawn apart.
    host = page.locator('#engine svg[aria-label^="8 blocks"] path.held')
    assert host.get_attribute("d").count("M") == 2
    expect(page.locator("#engine")).to_contain_text("2 hold what swapped requests will go on with")
    # The step's tokens in the colours of their requests, whose blocks stand out when pointed at.
    expect(page.locator("#engine .bar span")).to_have_count(2)
    page.locator('#engine tr[data-request="2"]').hover()
    held = grid.locator('path[data-request="1"]')
    expect(held).to_have_css("opacity", "0.15")
    # Rates and times over the last minutes, out of counters.
    expect(page.locator('[data-chart="generated"] b')).to_contain_text(re.compile(r"[1-9].* tok/s"))
    expect(page.locator('[data-chart="time to first token"] b')).to_have_text("0.25 s")
    expect(page.locator('[data-chart="requests"] .now')).to_contain_text("waiting 3")
    take_pictures(page, "engine")
    engine.num_waiting = 9
    expect(page.locator('#engine [data-figure="waiting"] b')).to_have_text("9")


@pytest.mark.slow
def test_nobody_looks_at_the_engine_from_the_chat(page: Page, engine: FakeObservability) -> None:
    page.reload()
    expect(page.get_by_role("tab", name="Engine")).to_be_visible()
    send(page, "hello")
    expect(answer(page)).to_contain_text("You said: hello")
    assert engine.looks == 0
    page.get_by_role("tab", name="Engine").click()
    assert engine.looked.wait(20)
    page.get_by_role("tab", name="Chat").click()
    expect(answer(page)).to_be_visible()
    looks, deadline = -1, time.monotonic() + 40
    while engine.looks != looks:
        assert time.monotonic() < deadline, "it goes on looking"
        looks = engine.looks
        time.sleep(2.5)


def test_without_leave_the_tab_says_which_flag_gives_it(
    page: Page, engine: FakeObservability
) -> None:
    engine.allowed = False
    page.reload()
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator("#engine").get_by_role("alert")).to_contain_text("--allow-watch-stats")
    assert engine.looks == 0
