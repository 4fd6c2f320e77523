"""Lines over the last minutes, as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from pagewire_ui import engine_history
from pagewire_ui.engine_history import Moment, Series

_WIDTH, _HEIGHT = 300, 72
# The time axis is at least so long.
_LEAST_SPAN_S = 60.0


def draw(moments: Sequence[Moment]) -> str:
    """The charts' HTML; nothing before there are two moments."""
    if len(moments) < 2:
        return ""
    span_s = max(_LEAST_SPAN_S, moments[-1].at_s - moments[0].at_s)
    queues = {
        name: engine_history.counts(moments, f"num_{name}")
        for name in ("running", "waiting", "swapped")
    }
    charts = (
        _chart("generated", "tok/s", {"line": engine_history.generated_per_s(moments)}, span_s),
        _chart("prompt", "tok/s", {"line": engine_history.prompt_per_s(moments)}, span_s),
        _chart("time to first token", "s", {"dots": engine_history.first_token_s(moments)}, span_s),
        _chart("requests", "", queues, span_s),
    )
    return f'<div class="charts">{"".join(charts)}</div>'


def _chart(title: str, unit: str, lines: Mapping[str, Series], span_s: float) -> str:
    values = [point[1] for series in lines.values() for point in series if point is not None]
    top = _round_up(max(values, default=0.0))
    drawn = "".join(_drawn(name, series, span_s, top) for name, series in lines.items())
    last = {
        name: _number(point[1])
        for name, series in lines.items()
        if (point := _last(series)) is not None
    }
    if len(lines) > 1:
        now = ", ".join(f"{name} {value}" for name, value in last.items())
        shown = "".join(
            f'<span class="key {name}">{name} <b>{value}</b></span>' for name, value in last.items()
        )
    else:
        now = f"{next(iter(last.values()), '–')} {unit}".strip()
        shown = f"<b>{now}</b>"
    over = f"the last {span_s:.0f} seconds, up to {_number(top)} {unit}"
    label = html.escape(f"{title}: {now}; {over}")
    axes = f'<path class="axis" d="M0 .5H{_WIDTH}M0 {_HEIGHT - 0.5}H{_WIDTH}"/>'
    return (
        f'<figure data-chart="{title}"><figcaption>{title} '
        f'<span class="now">{shown}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" '
        f'preserveAspectRatio="none">{axes}{drawn}</svg><span class="top">{_number(top)}</span>'
        f'<span class="from">{span_s:.0f} s ago</span></figure>'
    )


def _drawn(name: str, series: Series, span_s: float, top: float) -> str:
    steps: list[str] = []
    pen = "M"
    for point in series:
        if point is None:
            pen = "M"
            continue
        x = _WIDTH * (1 - point[0] / span_s)
        y = 1 + (_HEIGHT - 2) * (1 - point[1] / top)
        steps.append(f"M{x:.1f} {y:.1f}h.01" if name == "dots" else f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return f'<path class="{name}" d="{"".join(steps)}"/>' if steps else ""


def _last(series: Series) -> tuple[float, float] | None:
    return next((point for point in reversed(series) if point is not None), None)


def _round_up(value: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * 0.999)


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"
