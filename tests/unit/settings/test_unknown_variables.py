"""A misspelt environment variable is told, and one that somebody knows is not."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from pagewire.config import EngineConfig
from pagewire.settings import parse_settings
from pagewire.variables import SETTINGS, unknown_variables, variable_name, without_settings
from pagewire_frontend.bench.settings import BenchSettings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_settings import ServeSettings
from pagewire_ui.config import UiConfig

PROGRAMS: dict[str, type[BaseModel]] = {
    "engine-service": EngineConfig,
    "pagewire-frontend": FrontendConfig,
    "pagewire serve": ServeSettings,
    "pagewire bench": BenchSettings,
    "pagewire-ui": UiConfig,
}


def told(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], program: str = "pagewire-frontend"
) -> list[str]:
    argv = ["--model=m"] if program == "engine-service" else []
    parse_settings(PROGRAMS[program], argv, prog=program, description="", environ=environ)
    return capsys.readouterr().err.splitlines()


def test_the_settings_of_all_programs_are_known() -> None:
    fields = {name for config in PROGRAMS.values() for name in config.model_fields}
    assert fields == SETTINGS, "list a setting that is new, or gone, in pagewire.variables"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PAGEWIRE_LOG_LEVL", "PAGEWIRE_LOG_LEVEL"),
        ("PAGEWIRE_GRACE_PERIOD", "PAGEWIRE_GRACE_PERIOD_S"),
        ("PAGEWIRE_API_KEYS", "PAGEWIRE_API_KEY"),
        ("PAGEWIRE_CONFG", "PAGEWIRE_CONFIG"),
        ("PAGEWIRE_log_level", "PAGEWIRE_LOG_LEVEL"),
        ("PAGEWIRE_HTTP_PRT", "PAGEWIRE_HTTP_PORT"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_nearest(
    capsys: pytest.CaptureFixture[str], name: str, nearest: str
) -> None:
    assert told(capsys, {name: "1"}) == [
        f"pagewire-frontend: warning: {name} is set, and no setting is called so; "
        f"did you mean {nearest}?"
    ]


def test_a_variable_like_no_other_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, {"PAGEWIRE_XYZZY": ""}) == [
        "pagewire-frontend: warning: PAGEWIRE_XYZZY is set, and no setting is called so"
    ]


def test_a_misspelt_variable_is_told_before_the_error_that_it_may_be_the_reason_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(EngineConfig, [], prog="p", description="", environ={"PAGEWIRE_MODLE": "m"})
    errors = capsys.readouterr().err
    assert "did you mean PAGEWIRE_MODEL?" in errors
    assert "--model is required" in errors


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_warns_of_what_another_knows(
    capsys: pytest.CaptureFixture[str], program: str
) -> None:
    environ = {variable_name(name): "" for name in SETTINGS if name not in _GUARDS}
    assert told(capsys, environ, program) == []


# Set and empty, these are refused.
_GUARDS = {
    "api_key", "api_key_file", "auth", "ui_auth", "tls_cert", "tls_key", "tls_client_ca",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAGEWIRE_CACHE", "/tmp"),
        ("PAGEWIRE_CHAOS_SECONDS", "1"),
        ("PAGEWIRE_TEST_MODEL", "/m"),
        ("PAGEWIRE_SERVICE_HOST", "10.0.0.1"),
        ("PAGEWIRE_SERVICE_PORT_HTTP", "8000"),
        ("PAGEWIRE_FRONTEND_SERVICE_PORT", "8000"),
        ("PAGEWIRE_FRONTEND_PORT", "tcp://10.0.0.1:8000"),
        ("PAGEWIRE_FRONTEND_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("PAGEWIRED", "1"),
        ("_PAGEWIRE_WORKER", "1"),
    ],
)
def test_what_is_no_setting_but_has_its_use_is_not_told(
    capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    assert told(capsys, {name: value}) == []


def test_a_part_of_serve_does_not_tell_again_what_was_told() -> None:
    kept = without_settings(
        {"PATH": "p", "PAGEWIRE_CACHE": "c", "PAGEWIRE_MODEL": "m", "PAGEWIRE_MODLE": "m"}
    )
    assert kept == {"PATH": "p", "PAGEWIRE_CACHE": "c"}
    assert unknown_variables(kept) == []
