"""The engine drawn: queues, rates, the last step, the map of its blocks, its requests."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from pagewire.v1 import engine_pb2
from pagewire_ui import engine_charts
from pagewire_ui.engine_watch import EngineSight

# More cells than this would be too small to see, and too much to send each second.
MAX_CELLS = 4096
_FREE, _HELD, _SHARED, _CACHED = range(4)
# Of several blocks in one cell the state that is worth seeing most.
_RANK = (_FREE, _CACHED, _HELD, _SHARED)
_CELL = 10
_NAMES = {_FREE: "free", _HELD: "held", _SHARED: "shared", _CACHED: "cached"}
_STATES = {
    engine_pb2.EngineRequestView.STATE_WAITING: "waiting",
    engine_pb2.EngineRequestView.STATE_RUNNING: "running",
    engine_pb2.EngineRequestView.STATE_SWAPPED: "swapped",
    engine_pb2.EngineRequestView.STATE_FINISHED: "ended",
}
_MAX_ROWS = 64
_MAX_PIECES = 256
# Numbers of a block table that are shown.
_MAX_TABLE = 16


def draw(sight: EngineSight) -> str:
    """HTML of what was seen, or of why nothing was."""
    stats = sight.stats
    if stats is None:
        return f'<p role="alert">{html.escape(sight.error)}</p>'
    window = stats.window
    parts = [_tiles(stats), engine_charts.draw(sight.moments), _step(window)]
    if window.blocks:
        parts += ["<h2>KV blocks</h2>", block_map(window.blocks, window.requests), _legend(window)]
    if window.cpu_blocks:
        swapped = f'<div class="host">{block_map(window.cpu_blocks, ())}</div>'
        parts += ["<h2>KV blocks in host memory</h2>", swapped, _host_legend(window)]
    parts += [_requests(window.requests), _highlights(window.requests)]
    return "".join(parts)


def block_map(
    blocks: bytes, requests: Iterable[engine_pb2.EngineRequestView], columns: int = 96
) -> str:
    """An SVG with a cell for each block, or for several where there are more than MAX_CELLS.

    Args:
        blocks: a state each, by number.
        requests: whose blocks get a colour of their own, where nobody shares them.
        columns: cells in a row.
    """
    per_cell = max(1, math.ceil(len(blocks) / MAX_CELLS))
    owner = {block: view.id for view in requests for block in view.blocks}
    cells: dict[tuple[int, str], list[int]] = {}
    for cell, start in enumerate(range(0, len(blocks), per_cell)):
        group = range(start, min(start + per_cell, len(blocks)))
        block = max(group, key=lambda number: _RANK.index(blocks[number]))
        state = blocks[block]
        cells.setdefault((state, owner.get(block, "") if state == _HELD else ""), []).append(cell)
    rows = math.ceil(math.ceil(len(blocks) / per_cell) / columns)
    paths = [_path(state, name, found, columns) for (state, name), found in sorted(cells.items())]
    size = f"0 0 {columns * _CELL} {rows * _CELL}"
    label = f"{len(blocks)} blocks, {per_cell} a cell"
    return f'<svg viewBox="{size}" role="img" aria-label="{label}">{"".join(paths)}</svg>'


def _path(state: int, owner: str, cells: Sequence[int], columns: int) -> str:
    side = _CELL - 1
    squares = "".join(
        f"M{cell % columns * _CELL} {cell // columns * _CELL}h{side}v{side}h-{side}z"
        for cell in cells
    )
    title, colour = _NAMES[state], ""
    if owner:
        title = f"request {owner}"
        colour = f' data-request="{html.escape(owner)}" style="fill:{_colour(owner)}"'
    return (
        f'<path class="{_NAMES[state]}"{colour} d="{squares}">'
        f"<title>{html.escape(title)}</title></path>"
    )


def _colour(owner: str) -> str:
    """A colour for a request: neighbours in number are far apart on the wheel."""
    number = int(owner) if owner.isdecimal() else 0
    return f"hsl({number * 137 % 360} 62% 52%)"


def _tiles(stats: engine_pb2.GetStatsResponse) -> str:
    held = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
    hits = _percent(stats.prefix_cache_hits, stats.prefix_cache_queries)
    figures = [
        ("running", str(stats.num_running)),
        ("waiting", str(stats.num_waiting)),
        ("swapped", str(stats.num_swapped)),
        ("blocks held", _percent(held, stats.num_blocks)),
        ("blocks cached", _percent(stats.num_cached_blocks, stats.num_blocks)),
        ("prefix cache hits", hits),
        ("preemptions", str(stats.num_preemptions)),
        ("last step", f"{1000 * stats.step_time_s:.1f} ms"),
    ]
    tiles = (
        f'<div class="tile" data-figure="{name}"><b>{value}</b><span>{name}</span></div>'
        for name, value in figures
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _legend(window: engine_pb2.EngineWindow) -> str:
    counts = Counter(window.blocks)
    items = (
        f'<svg style="display:inline;width:.7rem;height:.7rem" viewBox="0 0 9 9"><path '
        f'class="{_NAMES[state]}" d="M0 0h9v9h-9z"/></svg> {counts[state]} {_NAMES[state]}'
        for state in (_FREE, _HELD, _SHARED, _CACHED)
    )
    note = "; what one request holds alone has a colour of its own"
    return f'<div class="legend">{"&nbsp;&nbsp; ".join(items)}{note}</div>'


def _host_legend(window: engine_pb2.EngineWindow) -> str:
    counts = Counter(window.cpu_blocks)
    return (
        f'<div class="legend">{len(window.cpu_blocks) - counts[_FREE]} hold what swapped requests '
        f"will go on with, {counts[_FREE]} free</div>"
    )


def _step(window: engine_pb2.EngineWindow) -> str:
    step = window.step
    names = [window.requests[index].id for index in step.request]
    rows = list(zip(names, step.num_tokens, strict=True))
    decodes, chunks = rows[: step.num_decodes], rows[step.num_decodes :]
    prefills = ", ".join(f"{length} tokens of request {name}" for name, length in chunks[:8])
    more = f" and {len(chunks) - 8} more" if len(chunks) > 8 else ""
    text = f"Step {step.step}: decodes {step.num_decodes}, prefill chunks {len(chunks)}"
    text += f" ({prefills}{more})" if chunks else ""
    text += "; an edge marks decodes" if decodes else ""
    parts = [(name, length, "decode") for name, length in decodes]
    parts += [(name, length, "prefill") for name, length in chunks]
    return f'<h2>Last step</h2>{_bar(parts)}<p class="step">{html.escape(text)}</p>'


def _bar(parts: Sequence[tuple[str, int, str]]) -> str:
    """The step's tokens side by side, each request in its colour."""
    total = sum(length for _, length, _ in parts)
    pieces = "".join(
        f'<span class="{kind}" data-request="{html.escape(name)}" style="flex-grow:{length};'
        f'background:{_colour(name)}" title="{length} tokens of request {html.escape(name)}, '
        f'{kind}"></span>'
        for name, length, kind in parts[:_MAX_PIECES]
    )
    label = f"{total} tokens of {len(parts)} sequences"
    return f'<div class="bar" role="img" aria-label="{label}">{pieces}</div>'


def _requests(views: Sequence[engine_pb2.EngineRequestView]) -> str:
    if not views:
        return ""
    rows = (
        f'<tr data-request="{html.escape(view.id)}">'
        f"<td>{html.escape(view.id)}</td><td>{_STATES.get(view.state, '')}</td>"
        f"<td>{view.num_prompt_tokens}</td><td>{view.num_output_tokens}</td>"
        f"<td>{view.num_computed_tokens}</td>"
        f"<td>{len(view.blocks) + len(view.cpu_blocks)}</td><td>{_block_table(view)}</td></tr>"
        for view in views[:_MAX_ROWS]
    )
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("request", "state", "prompt", "output", "computed", "blocks", "block table")
    )
    return (
        '<h2>Requests</h2><div class="pw-scroll" tabindex="0" role="region" aria-label="Requests">'
        f'<table class="pw-grid"><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _block_table(view: engine_pb2.EngineRequestView) -> str:
    """The numbers of its blocks, which need not lie side by side."""
    blocks = view.blocks or view.cpu_blocks
    shown = " ".join(map(str, blocks[:_MAX_TABLE]))
    return f"<code>{shown}{' …' if len(blocks) > _MAX_TABLE else ''}</code>"


def _highlights(views: Sequence[engine_pb2.EngineRequestView]) -> str:
    """Rules that show the blocks of the request that is pointed at, and dim the others."""
    ids = [view.id for view in views[:_MAX_ROWS] if view.id.isdecimal()]
    rules = "".join(
        f'#engine:has([data-request="{name}"]:hover) '
        f'svg [data-request]:not([data-request="{name}"]){{opacity:.15}}'
        for name in ids
    )
    return f"<style>{rules}</style>" if rules else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"
