"""Writes pagewire.json, the Grafana dashboard: `python deploy/grafana/make_dashboard.py`. What it
shows is in panels.py."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from panels import ROWS, Panel

TARGET = Path(__file__).with_name("pagewire.json")
DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ROW_WIDTH = 24


def build() -> str:
    """The dashboard as JSON."""
    board = (
        dashboard.Dashboard("pagewire")
        .uid("pagewire")
        .tags(["pagewire", "llm"])
        .description("Frontends and engines of pagewire, from the frontends' /metrics.")
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_variable("job", "label_values(pagewire_engine_ready, job)", every=False))
        .with_variable(
            _variable("model", 'label_values(pagewire_engine_ready{job="$job"}, model_name)')
        )
    )
    numbers = itertools.count(1)
    for title, panels in ROWS:
        board = board.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            made = _stat(panel) if panel.single else _graph(panel)
            board = board.with_panel(made.id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(board.build()) + "\n"


def _variable(name: str, query: str, *, every: bool = True) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).query(query).datasource(DATA_SOURCE)
    return variable.include_all(True).all_value(".*").multi(False) if every else variable


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query)
        .legend_format(legend or "__auto")
        .ref_id(chr(65 + number))
        for number, (legend, query) in enumerate(panel.queries)
    ]


def _stat(panel: Panel) -> stat.Panel:
    made = (
        stat.Panel()
        .title(panel.title)
        .unit(panel.unit)
        .datasource(DATA_SOURCE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(BigValueColorMode.NONE)
    )
    for target in _targets(panel):
        made = made.with_target(target)
    return made.height(4).span(ROW_WIDTH // 6)


def _graph(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .unit(panel.unit)
        .min(0)
        .datasource(DATA_SOURCE)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for target in _targets(panel):
        made = made.with_target(target)
    return made.height(8).span(ROW_WIDTH // 3)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.read_text() == build() else f"{TARGET} is old: run {sys.argv[0]}")
    TARGET.write_text(build())
