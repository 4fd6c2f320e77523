"""What programs log of themselves and of others, and under which name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pagewire.service_name import Program
from pagewire_frontend.service_output import ServiceOutput

OURS = ("pagewire", "pagewire_engine", "pagewire_frontend", "pagewire_kernels", "pagewire_ui")
OTHERS = ("h2", "grpc", "asyncio", "httpx", "markdown_it", "uvicorn.error", "new_library")
LEVELS = ("debug", "info", "warning", "error")

LOG = """
import logging, sys
from pagewire.logs import configure_logging
from pagewire.service_name import Program
configure_logging(sys.argv[1], sys.argv[2], Program.FRONTEND)
for name in sys.argv[3:]:
    for level in ("debug", "info", "warning", "error"):
        logging.getLogger(name).log(getattr(logging, level.upper()), level)
"""


def logged(
    level: str, *names: str, log_format: str = "text", env: dict[str, str] | None = None
) -> list[str]:
    """The lines of a program where each logger says something at each level."""
    done = subprocess.run(
        [sys.executable, "-c", LOG, level, log_format, *names],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_about_records_of_pagewire_s_own(level: str) -> None:
    names = [f"{package}.a_room" for package in OURS]
    lines = logged(level, *names)
    expected = [(name, each) for name in names for each in LEVELS[LEVELS.index(level) :]]
    assert [(line.split()[3].rstrip(":"), line.split()[4]) for line in lines] == expected


@pytest.mark.parametrize("level", LEVELS)
def test_others_say_nothing_at_debug_and_little_at_info(level: str) -> None:
    least = {"debug": "info", "info": "warning", "warning": "warning", "error": "error"}[level]
    lines = logged(level, *OTHERS)
    assert [line.split()[4] for line in lines] == len(OTHERS) * [*LEVELS[LEVELS.index(least) :]]


def test_every_package_of_pagewire_is_known_to_be_one() -> None:
    for package in OURS:
        assert importlib.util.find_spec(package) is not None
    assert {name for name in sys.modules if name.startswith("pagewire") and "." not in name} <= set(
        OURS
    )


def test_a_record_and_a_trace_name_the_same_service() -> None:
    (line,) = logged("error", "pagewire", log_format="json")
    assert json.loads(line)["service"] == Program.FRONTEND == "pagewire-frontend"
    (line,) = logged(
        "error", "pagewire", log_format="json", env={"OTEL_SERVICE_NAME": "chat-in-europe"}
    )
    assert json.loads(line)["service"] == "chat-in-europe"


def test_lines_that_a_service_did_not_log_have_the_name_of_those_it_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    programs = {"engine": Program.ENGINE, "worker 1": Program.FRONTEND}
    output = ServiceOutput("json", programs, Program.SUPERVISOR)
    output.service_line("engine", "loading", False)
    output.service_line("worker 1", "waiting", False)
    output.report("engine is stuck")
    told = [json.loads(line) for stream in capsys.readouterr() for line in stream.splitlines()]
    assert [(each["service"], each["message"]) for each in told] == [
        ("pagewire-engine", "loading"),
        ("pagewire-frontend", "waiting"),
        ("pagewire", "engine is stuck"),
    ]
