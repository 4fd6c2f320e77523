"""The adapters drawn: a table with lineage, memory and requests."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime

from pagewire.v1 import engine_pb2, inference_pb2
from pagewire_ui.adapters_client import Listing

_STATES = {
    engine_pb2.AdapterInfo.STATE_LOADING: "loading",
    engine_pb2.AdapterInfo.STATE_DISK: "on disk",
    engine_pb2.AdapterInfo.STATE_HOST: "in host memory",
    engine_pb2.AdapterInfo.STATE_DEVICE: "on the device",
    engine_pb2.AdapterInfo.STATE_LEAVING: "leaving",
}
_HEADS = ("adapter", "state", "lineage", "rank", "modules", "memory", "requests", "version")
# Of a hash: enough to tell two versions apart.
_VERSION_DIGITS = 10


def draw(listing: Listing, models: Sequence[inference_pb2.Model]) -> str:
    """HTML of the adapters.

    Args:
        listing: what the engine tells.
        models: what clients may choose; all there is to show where the listing is not allowed.
    """
    if listing.problem:
        kind = "problem" if listing.allowed else "pw-hint"
        role = "alert" if listing.allowed else "note"
        hint = f'<div class="{kind}" role="{role}">{html.escape(listing.problem)}</div>'
        return hint + _lineages(models)
    if not listing.adapters:
        return f'<p class="pw-hint">No adapter is loaded.</p>{_limits(listing)}'
    head = "".join(f'<th scope="col">{name}</th>' for name in _HEADS)
    rows = "".join(map(_row, listing.adapters))
    return (
        '<div class="pw-scroll" tabindex="0" role="region" aria-label="Loaded adapters">'
        f'<table class="pw-grid pw-adapters"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_limits(listing)}"
    )


def _row(adapter: engine_pb2.AdapterInfo) -> str:
    state = _STATES.get(adapter.state, "")
    scale = f"alpha {adapter.alpha:g}" + (", rsLoRA" if adapter.use_rslora else "")
    ships = [
        text
        for text, has in (
            ("template", adapter.has_chat_template),
            ("tokenizer", adapter.has_tokenizer),
        )
        if has
    ]
    cells = (
        f"<b>{html.escape(adapter.name)}</b><br><small>{html.escape(adapter.path)}</small>",
        f'<span class="pw-state" data-state="{state}">{state}</span>{_since(adapter)}',
        lineage(adapter.name, adapter.parent, adapter.root),
        f"{adapter.rank}<br><small>{scale}</small>",
        html.escape(", ".join(adapter.modules))
        + (f"<br><small>with its own {' and '.join(ships)}</small>" if ships else ""),
        _memory(adapter),
        f"{adapter.num_running_requests} running<br>{adapter.num_waiting_requests} waiting",
        f"<code>{html.escape(adapter.version[:_VERSION_DIGITS])}</code>",
    )
    name = html.escape(adapter.name, quote=True)
    return f'<tr data-adapter="{name}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def lineage(name: str, parent: str, root: str) -> str:
    """HTML of what an adapter comes from, the base model first."""
    chain = [link for link in dict.fromkeys((root, parent, name)) if link]
    return " → ".join(map(html.escape, chain))


def size(num_bytes: int) -> str:
    """A number of bytes for people."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes} B"


def _memory(adapter: engine_pb2.AdapterInfo) -> str:
    places = [
        f"{size(held)} {where}"
        for held, where in ((adapter.host_bytes, "host"), (adapter.device_bytes, "device"))
        if held
    ]
    return f"{size(adapter.bytes)}<br><small>{', '.join(places) or 'none held'}</small>"


def _since(adapter: engine_pb2.AdapterInfo) -> str:
    if not adapter.loaded_at:
        return ""
    try:
        moment = datetime.fromtimestamp(adapter.loaded_at, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return f"<br><small>since {moment:%Y-%m-%d %H:%M} UTC</small>"


def _limits(listing: Listing) -> str:
    limits = listing.limits
    if limits is None:
        return ""
    return (
        f'<p class="pw-note">At most {limits.max_loras} adapters in one step, '
        f"{limits.max_cpu_loras} in host memory, rank up to {limits.max_lora_rank}.</p>"
    )


def _lineages(models: Sequence[inference_pb2.Model]) -> str:
    items = "".join(
        f"<li>{lineage(model.id, model.parent, model.root)}</li>"
        for model in models
        if model.parent
    )
    return f"<h2>Adapters to choose from</h2><ul>{items}</ul>" if items else ""
