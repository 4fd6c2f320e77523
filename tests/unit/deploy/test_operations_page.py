"""What deploy/OPERATIONS.md says is so: figures, alerts, messages, flags and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pagewire.config import EngineConfig
from pagewire_engine.models.base import KVShape
from pagewire_engine.worker.cache_engine import bytes_per_block
from pagewire_engine.worker.cache_size import CacheSize
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_settings import ServeSettings
from pagewire_ui.config import UiConfig
from tests.unit.deploy.promql import alerts
from tests.unit.deploy.tools import DEPLOY, ROOT

PAGE = DEPLOY / "OPERATIONS.md"
TEXT = PAGE.read_text()
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def table(name: str) -> list[list[str]]:
    """The rows of the table between two comments."""
    found = re.search(rf"<!-- {name}:.*?-->\n(.*?)<!-- end of {name} -->", TEXT, re.DOTALL)
    assert found is not None
    rows = [line.strip("|").split("|") for line in found[1].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("row", table("sizing"), ids=lambda row: f"{row[0]}-{row[4]}")
def test_the_sizing_examples_are_the_engines_own_figures(row: list[str]) -> None:
    layers, heads, head_dim = map(int, row[1:4])
    dtype, (per_token, per_block) = DTYPES[row[4]], map(int, row[5:7])
    config = EngineConfig(model="m", kv_cache_memory=row[7])  # type: ignore[arg-type]  # a size
    block_bytes = bytes_per_block(KVShape(layers, heads, head_dim), config.block_size, dtype)
    assert (block_bytes // config.block_size, block_bytes) == (per_token, per_block)
    # The bounds of tiny models and short sequences are not met.
    num_blocks = CacheSize(config, "cuda", block_bytes, 131072).num_blocks(lambda: 0)
    assert [str(num_blocks), str(num_blocks * config.block_size)] == row[8:10]


def test_the_worked_example_follows_from_the_table() -> None:
    found = re.search(
        r"prompts of (\d+) tokens and answers of (\d+), the third row's (\d+) tokens hold (\d+) "
        r"requests; if a\s+request takes (\d+) s, that is (\d+) a second",
        " ".join(TEXT.split()),
    )
    assert found is not None
    prompt, answer, tokens, requests, seconds, rate = map(int, found.groups())
    assert str(tokens) == table("sizing")[2][9]
    assert requests == tokens // (prompt + answer)
    assert requests <= EngineConfig(model="m").max_num_seqs
    assert rate == requests // seconds


def anchors(text: str) -> set[str]:
    """The fragments that the page's headings have on a hub such as GitHub."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_alert_has_a_section_and_a_link_to_it() -> None:
    sections = re.findall(r"^### (Pagewire\w+)$", TEXT, re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).samefile(PAGE)
        assert anchor in anchors(TEXT)
        assert anchor == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("critical", "warning")


def test_sections_say_what_to_do() -> None:
    parts = re.split(r"^##+ (.*)$", TEXT, flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    for alert in alerts():
        assert len(bodies[alert["alert"]].split()) > 15


def source_texts() -> str:
    """The string literals of the programs, joined where the sources break them."""
    folders = ("protos/pagewire", "frontend", "engine_service", "kernels", "ui")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    text = "\n".join(file.read_text() for file in files if not file.name.endswith("_pb2.py"))
    return re.sub(r'"\n\s*f?"', "", text)


def test_the_messages_are_ones_that_the_programs_say() -> None:
    sources = source_texts()
    for message, advice in table("messages"):
        assert advice
        for part in re.findall(r"`([^`]+)`", message):
            assert part in sources, part


def test_the_flags_that_it_names_are_flags() -> None:
    known = {
        name.replace("_", "-")
        for settings in (EngineConfig, FrontendConfig, ServeSettings, UiConfig)
        for name in settings.model_fields
    }
    # Of `pagewire bench`, and of other programs.
    known |= {"target", "pid"}
    named = set(re.findall(r"`(?:[^`]* )?--([a-z][a-z-]+)", TEXT))
    assert len(named) > 20
    assert named <= known, named - known


@pytest.mark.parametrize("page", sorted(DEPLOY.rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
