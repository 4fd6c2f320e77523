"""The engine room: the served engine as it works, live."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest
from playwright.sync_api import Page, expect

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.e2e.serve_process import Served
from tests.ui.browser import take_pictures
from tests.ui.served.stack import NUM_SEQUENCES

pytestmark = pytest.mark.slow

NUM_REQUESTS = NUM_SEQUENCES + 2


@pytest.fixture
def calls(served: Served) -> Iterator[list[grpc.Call]]:
    """More answers on their way than the engine computes at once, longer than anybody waits."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        yield [
            stub.Generate(
                inference_pb2.GenerateRequest(
                    text=f"Once upon a time, in story number {number},",
                    sampling_params=sampling_pb2.SamplingParams(
                        temperature=0, max_tokens=900, ignore_eos=True
                    ),
                )
            )
            for number in range(NUM_REQUESTS)
        ]


def test_queues_blocks_steps_and_rates_are_drawn_live(
    page: Page, served: Served, calls: list[grpc.Call]
) -> None:
    # By force: a browser that the model leaves no time on a small machine is never at rest.
    page.get_by_role("tab", name="Engine").click(force=True)
    engine = page.locator("#engine")
    expect(engine.locator('[data-figure="running"] b')).to_have_text(str(NUM_SEQUENCES))
    expect(engine.locator('[data-figure="waiting"] b')).to_have_text("2")
    # The map: what each request holds in a colour of its own, and the rest by state.
    grid = engine.locator('svg[aria-label$="1 a cell"]').first
    expect(grid.locator("path.held[data-request]")).to_have_count(NUM_SEQUENCES)
    expect(grid.locator("path.free")).to_have_count(1)
    for state in ("free", "held", "shared", "cached"):
        expect(engine.locator(".legend").first).to_contain_text(re.compile(rf"\d+ {state}"))
    expect(engine).to_contain_text("KV blocks in host memory")
    expect(engine).to_contain_text("hold what swapped requests will go on with")
    # The step: a piece for each sequence.
    expect(engine.locator(".bar span.decode")).to_have_count(NUM_SEQUENCES)
    expect(engine.locator(".step")).to_contain_text(f"decodes {NUM_SEQUENCES}")
    expect(engine.locator("tr[data-request]")).to_have_count(NUM_REQUESTS)
    # Over time.
    generated = engine.locator('[data-chart="generated"]')
    expect(generated.locator("b")).to_have_text(re.compile(r"[1-9][\d.]* tok/s"))
    expect(generated.locator("path.line")).to_be_attached()
    expect(engine.locator('[data-chart="requests"] .now')).to_contain_text("waiting 2")
    step = engine.locator(".step").inner_text()
    expect(engine.locator(".step")).not_to_have_text(step)
    take_pictures(page, "served-engine")
    # And it follows: those that waited run, and in the end their blocks are cached.
    for call in calls[:2]:
        call.cancel()
    expect(engine.locator('[data-figure="waiting"] b')).to_have_text("0")
    for call in calls:
        call.cancel()
    # Times to the first token are those of requests that have ended of themselves.
    served.chat("Hello!", max_tokens=4)
    first_token = engine.locator('[data-chart="time to first token"]')
    expect(first_token.locator("b")).to_have_text(re.compile(r"[\d.]+ s"))
    expect(first_token.locator("path.dots")).to_be_attached()
    expect(engine.locator('[data-figure="running"] b')).to_have_text("0")
    expect(engine.locator('[data-figure="blocks held"] b')).to_have_text("0 %")
    expect(grid.locator("path.cached")).to_have_count(1)
    take_pictures(page, "served-engine-after")
