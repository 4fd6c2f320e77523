"""`pagewire serve` with the small real model, an adapter for it, and a browser on its page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from safetensors.numpy import save_file

from tests.e2e.serve_process import MODEL, Served, ServeProcess
from tests.fakes.ports import free_port
from tests.ui.browser import answer, choose, send, take_pictures

_NUM_LAYERS, _HIDDEN, _RANK = 30, 576, 4


def write_adapter(folder: Path) -> None:
    """A random adapter for the model's queries, large enough to be heard in any answer."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = np.random.default_rng(7)
    weights = {}
    for layer in range(_NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for half, shape in (("lora_A", (_RANK, _HIDDEN)), ("lora_B", (_HIDDEN, _RANK))):
            values = numbers.normal(0, 0.2, shape).astype(np.float32)
            weights[f"{name}.{half}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_adapter(folder / "adapters" / "noise")
    flags = [
        str(smollm2_path),
        f"--served-model-name={MODEL}",
        "--http-port=0",
        "--grpc-port=0",
        f"--ui-port={free_port()}",
        "--max-model-len=1024",
        "--kv-cache-memory=100000000",
        "--enable-lora",
        f"--lora-dir={folder / 'adapters'}",
        "--allow-runtime-lora-updating",
        "--allow-request-chat-template",
        "--allow-watch-stats",
    ]
    with ServeProcess(flags, cwd=folder) as process:
        process.wait_for("pagewire is ready", timeout_s=400)
        yield Served(process)


@pytest.fixture(scope="module")
def page(browser: Browser, served: Served) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.goto(served.page)
    expect(opened.locator("#head")).to_contain_text(MODEL)
    choose(opened, "Sampling", "Precise")
    opened.locator("#max-tokens textarea").fill("24")
    yield opened
    opened.close()


def test_the_model_answers_and_tells_what_else_it_might_have_said(page: Page) -> None:
    send(page, "What is the capital of France?")
    expect(answer(page).locator(".pw-figures")).to_contain_text("first token after")
    expect(answer(page)).to_contain_text("Paris")
    answer(page).get_by_role("button", name="Tokens").click()
    answer(page).locator(".pw-token", has_text="Paris").first.hover()
    card = answer(page).locator(".pw-token-card")
    expect(card.locator("tbody tr")).to_have_count(5)
    expect(card.locator("tr.chosen")).to_contain_text("Paris")
    take_pictures(page, "served-chat")


def test_an_adapter_is_loaded_compared_and_unloaded(page: Page) -> None:
    page.get_by_role("tab", name="Adapters").click()
    page.get_by_label("Name", exact=True).fill("noisy")
    choose(page, "Folder", "noise")
    page.locator("#load").click()
    expect(page.locator("#adapters-note")).to_contain_text("Loaded noisy: rank 4")
    row = page.locator('[data-adapter="noisy"]')
    expect(row).to_contain_text(f"{MODEL} → noisy")
    expect(row).to_contain_text("q_proj")
    take_pictures(page, "served-adapters")
    page.get_by_role("tab", name="Compare").click()
    choose(page, "Right", f"noisy (adapter of {MODEL})")
    page.get_by_label("Question").fill("What is the capital of France?")
    page.locator("#compare-ask").click()
    left, right = page.locator(".pw-side").first, page.locator(".pw-side").last
    for side in (left, right):
        expect(side.locator(".pw-actions")).to_be_visible()
    expect(left).to_contain_text("Paris")
    body = ".pw-markdown >> nth=-1"
    assert left.locator(body).inner_text() != right.locator(body).inner_text()
    take_pictures(page, "served-compare")
    page.get_by_role("tab", name="Adapters").click()
    choose(page, "Adapter", "noisy")
    page.locator("#unload").click()
    expect(page.locator("#adapters-note")).to_contain_text("Unloaded noisy")
    expect(page.locator("#adapters-table")).to_contain_text("No adapter is loaded")


def test_its_template_and_tokenizer_are_seen(page: Page) -> None:
    page.get_by_role("tab", name="Templates").click()
    preview = page.locator("#prompt-preview")
    expect(preview.locator(".pw-token.control").first).to_have_text("<|im_start|>")
    expect(preview).to_contain_text("What is a page table?")
    take_pictures(page, "served-templates")
    page.get_by_role("tab", name="Tokenizer").click()
    expect(page.locator("#token-count")).to_contain_text("tokens")
    take_pictures(page, "served-tokenizer")


def test_the_engine_is_seen_at_work(page: Page) -> None:
    page.get_by_role("tab", name="Chat").click()
    page.locator("#max-tokens textarea").fill("400")
    send(page, "Write a long story about a dragon who counts blocks.")
    expect(answer(page)).to_contain_text(re.compile(r"\w+ \w+"))
    # By force: a browser that the model leaves no time on a small machine is never at rest.
    page.get_by_role("tab", name="Engine").click(force=True)
    expect(page.locator('[data-chart="generated"] path.line')).to_be_attached()
    expect(page.locator("#engine svg[aria-label*=blocks] path:not(.free)").first).to_be_attached()
    take_pictures(page, "served-engine")
    page.get_by_role("tab", name="Chat").click(force=True)
    page.locator("#message textarea").press("Escape")
    expect(page.locator("#message .submit-button")).to_be_visible()
