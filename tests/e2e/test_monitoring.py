"""A real Prometheus scrapes a real frontend, and every query of the rules and the dashboard finds
what it asks for."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.serve_process import ServeProcess
from tests.fakes.ports import free_port
from tests.unit.deploy.promql import (
    RECORDED,
    Query,
    dashboard_queries,
    rule_queries,
    rules,
    selectors,
)
from tests.unit.deploy.tools import ROOT, RULES, tool

pytestmark = pytest.mark.slow

PIRATE = ROOT / "tests" / "adapters" / "pirate"
# Before the first scrape there is no rate: it takes two of them with requests between.
SCRAPES = 4
# What figures of engines have where they are several.
OF_SEVERAL = {"engine"}


def chat(url: str, model: str, max_tokens: int = 4) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": max_tokens,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=120)


class Prometheus:
    """A server that scrapes `target` each second and evaluates our rules as often."""

    def __init__(self, target: str, folder: Path) -> None:
        program = tool("prometheus", "apt-get install prometheus")
        port = free_port()
        told = yaml.safe_load(RULES.read_text())
        for group in told["groups"]:
            group["interval"] = "1s"
        (folder / "rules.yaml").write_text(yaml.safe_dump(told))
        scraped = {"job_name": "pagewire", "static_configs": [{"targets": [target]}]}
        (folder / "prometheus.yaml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "rule_files": ["rules.yaml"],
                    "scrape_configs": [scraped],
                }
            )
        )
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
        )  # fmt: skip

    def ask(self, query: str) -> list[dict[str, Any]]:
        """An instant vector."""
        answer = self._get("query", {"query": query})
        assert answer["status"] == "success", f"{query}: {answer}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """How the rules went."""
        groups = self._get("rules", {})["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for_scrapes(self, count: int) -> None:
        """Until so many have gone well."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):  # it is starting
                found = self.ask('count_over_time((up{job="pagewire"} == 1)[5m:1s])')
                if found and float(found[0]["value"][1]) >= count:
                    return
            time.sleep(0.5)
        raise AssertionError("Prometheus has not scraped the frontend")

    def _get(self, path: str, params: dict[str, str]) -> Any:
        answer = httpx.get(f"{self._url}/{path}", params=params, trust_env=False, timeout=30)
        return answer.raise_for_status().json()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[Prometheus]:
    flags = [f"--model={smollm2_path}", "--served-model-name=base", "--max-model-len=256"]
    flags += ["--kv-cache-memory=30000000", "--swap-space=10000000", "--enable-lora"]
    flags += [f"--lora-modules=pirate={PIRATE}", "--http-port=0", "--grpc-port=0", "--ui-port=0"]
    folder = tmp_path_factory.mktemp("monitoring")
    with ServeProcess(flags, cwd=folder) as process:
        ready = re.search(r"OpenAI API (http://\S+)/v1", process.wait_for("pagewire is ready"))
        assert ready is not None
        url = ready[1]
        # Each label that is a case of something has to be seen once, before the first scrape.
        assert chat(url, "base").status_code == 200
        assert chat(url, "nobody").status_code == 404
        server = Prometheus(url.removeprefix("http://"), folder)
        try:
            server.wait_for_scrapes(1)
            for model in ("base", "pirate"):
                assert chat(url, model).status_code == 200
            assert chat(url, "nobody").status_code == 404
            server.wait_for_scrapes(SCRAPES)
            yield server
        finally:
            server.stop()


def every_query() -> list[Query]:
    return [*rule_queries(), *dashboard_queries()]


def test_every_metric_and_label_that_is_asked_for_exists(prometheus: Prometheus) -> None:
    asked = {(one, query.origin) for query in every_query() for one in selectors(query.expr)}
    names = {one.metric for one, _ in asked}
    found = {name: prometheus.ask(name) for name in names}
    for one, origin in asked:
        told = found[one.metric]
        assert told, f"{origin}: {one.metric} does not exist"
        for label in one.labels - OF_SEVERAL:
            where = f"{origin}: {one.metric} has no label {label}"
            assert any(label in series["metric"] for series in told), where


def test_every_query_of_the_dashboard_draws_something(prometheus: Prometheus) -> None:
    empty = [query for query in dashboard_queries() if not prometheus.ask(query.expr)]
    assert not empty


def test_every_rule_is_evaluated_and_what_is_recorded_is_there(prometheus: Prometheus) -> None:
    evaluated = prometheus.rules()
    assert len(evaluated) == len(list(rules()))
    assert [rule for rule in evaluated if rule["health"] != "ok"] == []
    for rule in rules():
        if "record" in rule:
            assert rule["record"].startswith(RECORDED)
            assert prometheus.ask(rule["record"]), rule["record"]


def test_every_figure_of_ours_is_on_the_dashboard(prometheus: Prometheus) -> None:
    told = {series["metric"]["__name__"] for series in prometheus.ask('{__name__=~"pagewire_.+"}')}
    shown = {one.metric for query in dashboard_queries() for one in selectors(query.expr)}

    def family(name: str) -> str:
        for ending in ("_bucket", "_count", "_sum"):
            name = name.removesuffix(ending)
        return name

    counted = {family(name) for name in told if not name.endswith("_created")}
    assert counted <= {family(name) for name in shown}
