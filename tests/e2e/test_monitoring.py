"""A real Prometheus scrapes a real frontend of a real engine, all of them with TLS, and every query
of the rules and the dashboard finds what it asks for."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from tests.fakes.ports import free_port
from tests.fakes.real_processes import RealEngine, RealFrontend
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


def write_certificates(folder: Path) -> dict[str, str]:
    """Paths of an issuer's certificate (ca), and of a pair for this machine (cert, key)."""
    ca = trustme.CA()
    pair = ca.issue_cert("localhost", "127.0.0.1")
    paths = {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    ca.cert_pem.write_to_path(paths["ca"])
    pair.cert_chain_pems[0].write_to_path(paths["cert"])
    pair.private_key_pem.write_to_path(paths["key"])
    return paths


class Client:
    """Of a frontend with TLS."""

    def __init__(self, url: str, ca: str) -> None:
        self._url, self._context = url, ssl.create_default_context(cafile=ca)

    def chat_status(self, model: str) -> int:
        answer = httpx.post(
            f"{self._url}/v1/chat/completions",
            json={
                "model": model,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 4,
            },
            trust_env=False,
            timeout=120,
            verify=self._context,
        )
        return answer.status_code


class Prometheus:
    """A server that scrapes `target` each second and evaluates our rules as often."""

    def __init__(self, target: str, ca: str, folder: Path) -> None:
        program = tool("prometheus", "apt-get install prometheus")
        port = free_port()
        told = yaml.safe_load(RULES.read_text())
        for group in told["groups"]:
            group["interval"] = "1s"
        (folder / "rules.yaml").write_text(yaml.safe_dump(told))
        scraped = {
            "job_name": "pagewire",
            "scheme": "https",
            "tls_config": {"ca_file": ca},
            "static_configs": [{"targets": [target]}],
        }
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
    folder = tmp_path_factory.mktemp("monitoring")
    files = write_certificates(folder)
    tls = [f"--tls-cert={files['cert']}", f"--tls-key={files['key']}"]
    flags = [f"--model={smollm2_path}", "--served-model-name=base", "--max-model-len=256"]
    flags += ["--kv-cache-memory=30000000", "--swap-space=10000000", "--enable-lora"]
    flags += [f"--lora-modules=pirate={PIRATE}"]
    with (
        RealEngine(*flags, *tls) as engine,
        RealFrontend(engine.target, f"--engine-ca={files['ca']}", *tls) as frontend,
    ):
        client = Client(frontend.http, files["ca"])
        # Each label that is a case of something has to be seen once, before the first scrape.
        assert client.chat_status("base") == 200
        assert client.chat_status("nobody") == 404
        server = Prometheus(frontend.http.removeprefix("https://"), files["ca"], folder)
        try:
            server.wait_for_scrapes(1)
            for model in ("base", "pirate"):
                assert client.chat_status(model) == 200
            assert client.chat_status("nobody") == 404
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
