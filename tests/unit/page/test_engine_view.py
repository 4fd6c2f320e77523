"""The drawing shows each block once, in a bounded number of cells."""

from __future__ import annotations

import re

import hypothesis.strategies as st
from hypothesis import given

from pagewire.v1 import engine_pb2
from pagewire_ui.engine_view import MAX_CELLS, block_map, draw
from pagewire_ui.engine_watch import EngineSight


def cells(svg: str) -> dict[str, int]:
    """Number of cells by class; of a request's own, by its title."""
    found = re.findall(r'<path class="(\w+)"[^>]* d="([^"]*)"><title>([^<]*)', svg)
    counts: dict[str, int] = {}
    for name, squares, title in found:
        key = title if name == "held" else name
        counts[key] = counts.get(key, 0) + squares.count("M")
    return counts


@given(st.binary(min_size=1, max_size=400).map(lambda data: bytes(byte % 4 for byte in data)))
def test_each_block_is_a_cell_of_its_state(blocks: bytes) -> None:
    wanted = {
        name: blocks.count(state)
        for state, name in enumerate(("free", "held", "shared", "cached"))
        if blocks.count(state)
    }
    svg = block_map(blocks, ())
    assert cells(svg) == wanted
    squares = re.findall(r"M\d+ \d+", svg)
    assert len(set(squares)) == len(squares) == len(blocks)


def test_a_request_s_blocks_have_a_colour_of_their_own() -> None:
    views = [
        engine_pb2.EngineRequestView(id="1", blocks=[0, 1]),
        engine_pb2.EngineRequestView(id="2", blocks=[2, 3]),
    ]
    svg = block_map(bytes([1, 1, 1, 2]), views)
    assert cells(svg) == {"request 1": 2, "request 2": 1, "shared": 1}
    assert len(set(re.findall(r"fill:([^\"]*)", svg))) == 2


def test_a_large_pool_is_drawn_in_a_bounded_number_of_cells() -> None:
    blocks = bytearray(100_000)
    blocks[50_000] = 2
    svg = block_map(bytes(blocks), ())
    drawn = cells(svg)
    assert sum(drawn.values()) <= MAX_CELLS
    assert drawn["shared"] == 1
    assert len(svg) < 120_000


def test_what_was_not_seen_is_said_in_words_that_can_not_run() -> None:
    assert draw(EngineSight(error="<b>gone</b>")) == '<p role="alert">&lt;b&gt;gone&lt;/b&gt;</p>'


def test_blocks_in_host_memory_have_a_map_of_their_own() -> None:
    stats = engine_pb2.GetStatsResponse(num_blocks=4, num_free_blocks=4, num_swapped=1)
    stats.window.blocks = bytes(4)
    stats.window.cpu_blocks = bytes([0, 1, 2, 1, 0, 0])
    stats.window.requests.add(
        id="7", state=engine_pb2.EngineRequestView.STATE_SWAPPED, cpu_blocks=[1, 2, 3]
    )
    text = draw(EngineSight(stats))
    device, _, host = text.partition("<h2>KV blocks in host memory</h2>")
    assert cells(device) == {"free": 4}
    assert cells(host) == {"free": 3, "held": 2, "shared": 1}
    assert "<td>7</td><td>swapped</td><td>0</td><td>0</td><td>0</td><td>3</td>" in host


def test_an_idle_engine_is_drawn() -> None:
    stats = engine_pb2.GetStatsResponse(num_blocks=4, num_free_blocks=4)
    stats.window.blocks = bytes(4)
    text = draw(EngineSight(stats))
    assert "decodes 0, prefill chunks 0" in text
    assert "<table>" not in text
