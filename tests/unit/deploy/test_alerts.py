"""Prometheus' own tool says that the rules are well-formed, that each alert comes when it should,
and that none comes when all is well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire.errors import ErrorCode
from tests.unit.deploy.promql import alerts, rule_queries, selectors
from tests.unit.deploy.tools import RULES, promtool

# What promtool's series are of: an instance's, and with the label of our own figures.
INSTANCE = {"job": "pagewire", "instance": "a"}
OURS = INSTANCE | {"model_name": "m"}
BUCKETS = ("0.05", "10.0", "20.0", "+Inf")


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    told = (INSTANCE if name.startswith(("up", "process_")) else OURS) | labels
    inside = ",".join(f'{key}="{value}"' for key, value in told.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def histogram(name: str, slow: bool) -> list[dict[str, str]]:
    """Ten values a minute, all in the first bucket or all in the last that has a bound."""
    return [
        series(f"{name}_bucket", "0+0x40" if slow and bound in BUCKETS[:2] else "0+10x40", le=bound)
        for bound in BUCKETS
    ]


@dataclass(frozen=True)
class Case:
    """Series that replace those of a good day, and the labels with which the alert must come."""

    changed: list[dict[str, str]]
    labels: dict[str, str]
    minute: int = 30


GOOD = [
    series("up", "1x40"),
    series("pagewire_engine_ready", "1x40"),
    series("pagewire_engine_up", "1x40", engine="a"),
    series("pagewire_engine_up", "1x40", engine="b"),
    series("pagewire_num_requests_running", "8x40"),
    series("pagewire_num_requests_waiting", "3x40"),
    series("pagewire_engine_steps_total", "0+600x40"),
    series("pagewire_engine_steps_out_of_memory_total", "1x40"),
    series("pagewire_num_preemptions_total", "0+1x40"),
    series("pagewire_kv_cache_usage_perc", "0.7x40"),
    series("pagewire_cpu_cache_usage_perc", "0.1x40"),
    series("pagewire_requests_resumed_total", "4x40"),
    series("pagewire_engine_connections_lost_total", "1x40"),
    series("pagewire_wire_frames_dropped_total", "2x40", reason="damaged"),
    series("pagewire_engine_wire_frames_dropped_total", "0+5x40", reason="unsent"),
    series("pagewire_lora_host_evictions_total", "0+1x40"),
    series("pagewire_e2e_request_latency_seconds_count", "0+600x40"),
    *(
        series("pagewire_request_failure_total", "0+1x40", code=code)
        for code in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "INTERNAL")
    ),
    series("pagewire_request_failure_total", "2x40", code="UNAVAILABLE"),
    *histogram("pagewire_time_to_first_token_seconds", slow=False),
    *histogram("pagewire_request_time_per_output_token_seconds", slow=False),
    series("pagewire_tls_certificate_expiry_timestamp_seconds", "2e6x40", certificate="tls-cert"),
    series("pagewire_engine_tls_certificate_expiry_timestamp_seconds", "2e6x40", engine="a"),
    series("process_open_fds", "100x40"),
    series("process_max_fds", "1024x40"),
]
MODEL = {"job": "pagewire", "model_name": "m"}


def failing(code: str, values: str = "0+120x40") -> list[dict[str, str]]:
    return [series("pagewire_request_failure_total", values, code=code)]


CASES: dict[str, Case] = {
    "PagewireFrontendDown": Case([series("up", "0x40")], INSTANCE),
    "PagewireNoFrontends": Case([series("up", "_x40")], {"job": "pagewire"}),
    "PagewireEngineDown": Case([series("pagewire_engine_ready", "0x40")], OURS),
    "PagewireReplicaDown": Case(
        [series("pagewire_engine_up", "0x40", engine="b")], MODEL | {"engine": "b"}
    ),
    "PagewireEngineStuck": Case([series("pagewire_engine_steps_total", "600x40")], MODEL),
    "PagewireEngineRestarts": Case(
        [series("pagewire_engine_steps_total", "0+600x15 0+600x5 0+600x20")], MODEL
    ),
    "PagewireOutOfMemory": Case(
        [series("pagewire_engine_steps_out_of_memory_total", "0x25 1x15")], MODEL
    ),
    "PagewireStreamsMove": Case([series("pagewire_requests_resumed_total", "0x25 32x15")], MODEL),
    "PagewireEngineConnectionsLost": Case(
        [series("pagewire_engine_connections_lost_total", "0+1x40")], MODEL
    ),
    "PagewireFramesDamaged": Case(
        [series("pagewire_wire_frames_dropped_total", "0x25 1x15", reason="damaged")], MODEL
    ),
    "PagewireStreamsLost": Case(failing("UNAVAILABLE", "0x27 5x13"), MODEL),
    "PagewireQueueGrows": Case([series("pagewire_num_requests_waiting", "0+2x40")], MODEL),
    "PagewireRequestsRefused": Case(failing("RESOURCE_EXHAUSTED"), MODEL),
    "PagewireDeadlinesMissed": Case(failing("DEADLINE_EXCEEDED"), MODEL),
    "PagewireErrorRateHigh": Case(failing("INTERNAL"), MODEL),
    "PagewireKvCacheFull": Case([series("pagewire_kv_cache_usage_perc", "0.99x40")], MODEL),
    "PagewirePreemptions": Case([series("pagewire_num_preemptions_total", "0+60x40")], MODEL),
    "PagewireSwapSpaceFull": Case([series("pagewire_cpu_cache_usage_perc", "0.95x40")], MODEL),
    "PagewireFirstTokenSlow": Case(
        histogram("pagewire_time_to_first_token_seconds", slow=True), MODEL
    ),
    "PagewireTokensSlow": Case(
        histogram("pagewire_request_time_per_output_token_seconds", slow=True), MODEL
    ),
    "PagewireFileDescriptorsLow": Case([series("process_open_fds", "1000x40")], INSTANCE),
    # The clock of promtool begins at 0.
    "PagewireCertificateExpires": Case(
        [
            series(
                "pagewire_tls_certificate_expiry_timestamp_seconds",
                "5e5x120",
                certificate="tls-cert",
            )
        ],
        MODEL | {"certificate": "tls-cert"},
        minute=70,
    ),
    "PagewireCertificateExpiresNow": Case(
        [series("pagewire_engine_tls_certificate_expiry_timestamp_seconds", "5e4x40", engine="a")],
        MODEL | {"engine": "a"},
    ),
    "PagewireAdaptersReadAgain": Case(
        [series("pagewire_lora_host_evictions_total", "0+60x40")], MODEL
    ),
}


def scenario(case: Case | None, expected: list[dict[str, Any]]) -> dict[str, Any]:
    changed = {} if case is None else {one["series"]: one for one in case.changed}
    return {
        "interval": "1m",
        "input_series": list({**{one["series"]: one for one in GOOD}, **changed}.values()),
        "alert_rule_test": expected,
    }


def run(tmp_path: Path, test: dict[str, Any]) -> None:
    """Has promtool play a scenario, with the rules' annotations left out: it would want to be told
    of each with the values filled in."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(told))
    result = promtool("test", "rules", str(file))
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_rules() -> None:
    result = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_has_a_case() -> None:
    assert [alert["alert"] for alert in alerts()] == list(CASES)


def test_nothing_alerts_on_a_good_day(tmp_path: Path) -> None:
    quiet = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
        for name in CASES
        for minute in (10, 30, 40)
    ]
    run(tmp_path, scenario(None, quiet))


@pytest.mark.parametrize("name", CASES)
def test_an_alert_comes_when_it_should(tmp_path: Path, name: str) -> None:
    (alert,) = [alert for alert in alerts() if alert["alert"] == name]
    case = CASES[name]
    expected = {"exp_labels": case.labels | alert["labels"]}
    at = {"eval_time": f"{case.minute}m", "alertname": name, "exp_alerts": [expected]}
    run(tmp_path, scenario(case, [at]))


def test_cases_are_made_of_series_that_the_rules_read() -> None:
    read = {one.metric for query in rule_queries() for one in selectors(query.expr)}
    made = {one["series"].partition("{")[0] for one in GOOD}
    assert made == {name for name in read if not name.startswith("pagewire:")}


def test_the_codes_that_rules_ask_for_are_codes() -> None:
    codes = {
        value
        for query in rule_queries()
        for one in selectors(query.expr)
        for name, values in one.wanted
        if name == "code"
        for value in values.split("|")
    }
    assert codes
    assert codes <= set(ErrorCode.__members__)
