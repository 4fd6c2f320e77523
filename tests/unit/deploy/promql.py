"""What the rules and the dashboard ask Prometheus, taken apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml

from tests.unit.deploy.tools import DASHBOARD, RULES

# What Grafana puts in before it asks.
_VARIABLES = {"$__rate_interval": "1m", "$job": "pagewire", "$model": ".*"}
RECORDED = "pagewire:"


@dataclass(frozen=True)
class Query:
    """A query and where it is from."""

    origin: str
    expr: str


@dataclass(frozen=True)
class Selector:
    """A metric that a query reads, the labels it goes by, and the values it wants of some."""

    metric: str
    labels: frozenset[str]
    wanted: tuple[tuple[str, str], ...]


def rules() -> Iterator[dict[str, Any]]:
    """Each rule of the file."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    """The rules that alert."""
    return [rule for rule in rules() if "alert" in rule]


def rule_queries() -> list[Query]:
    """What the rules ask."""
    return [Query(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def dashboard_queries() -> list[Query]:
    """What the dashboard asks, its variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for name, value in _VARIABLES.items():
                expr = expr.replace(name, value)
            found.append(Query(panel["title"], expr))
    return found


def selectors(expr: str) -> list[Selector]:
    """What a query reads."""
    return list(_walk(promql_parser.parse(expr), frozenset()))


def _walk(node: Any, grouping: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = node.matchers.matchers
        named = frozenset(matcher.name for matcher in matchers)
        wanted = tuple((matcher.name, matcher.value) for matcher in matchers)
        yield Selector(node.name, named | grouping, wanted)
        return
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
        grouping |= frozenset(modifier.labels)
    if isinstance(node, promql_parser.BinaryExpr) and modifier is not None and modifier.matching:
        grouping |= frozenset(modifier.matching.labels or ())
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from _walk(child, grouping)
    for argument in getattr(node, "args", ()):
        yield from _walk(argument, grouping)
