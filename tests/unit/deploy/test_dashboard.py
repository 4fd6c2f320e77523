"""The Grafana dashboard: what its maker writes, whole and unambiguous. That its queries find
something is tests/e2e/test_monitoring.py's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.unit.deploy.tools import DASHBOARD, DEPLOY, ROOT


def panels() -> list[dict[str, Any]]:
    return list(json.loads(DASHBOARD.read_text())["panels"])


def test_it_is_what_its_maker_writes() -> None:
    result = subprocess.run(
        [sys.executable, str(DEPLOY / "grafana" / "make_dashboard.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_panels_have_their_own_places() -> None:
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers) > 30
    places = [(place["x"], place["y"]) for place in (panel["gridPos"] for panel in panels())]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())


def test_each_graph_names_its_unit_and_asks_the_source_that_the_reader_chose() -> None:
    for panel in panels():
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
