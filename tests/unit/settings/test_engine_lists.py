"""A frontend's engines: one or a list, by flags, with commas, from YAML or the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pagewire.settings import parse_settings, settings_to_argv
from pagewire_frontend.config import FrontendConfig


def parsed(*argv: str, **environ: str) -> FrontendConfig:
    return parse_settings(
        FrontendConfig, argv, prog="", description="", positional=["engine"], environ=environ
    )


def test_each_way_of_naming_several_engines() -> None:
    both = ("a:1", "b:2")
    assert parsed("--engine=a:1", "--engine", "b:2").engine == both
    assert parsed("--engine=a:1, b:2").engine == both
    assert parsed("a:1,b:2").engine == both
    assert parsed(PAGEWIRE_ENGINE="a:1,b:2").engine == both
    assert FrontendConfig(engine=["a:1", "b:2"]).engine == both
    assert parsed("a:1").engine == ("a:1",)
    # And on to workers, which are told by flags.
    assert parsed(*settings_to_argv(FrontendConfig(engine=both))).engine == both


def test_a_list_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text("engine: [a:1, b:2]\n")
    assert parsed(f"--config={file}").engine == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (["a:1", "b"], "HOST:PORT"),
        ("a:1,", "HOST:PORT"),
        ("a:1,a:1", "names an engine twice"),
        ([], "at least 1"),
        (7, "tuple"),
    ],
)
def test_what_names_no_engine_is_refused(engine: object, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        FrontendConfig(engine=engine)  # type: ignore[arg-type]


def test_messages_name_all_of_them() -> None:
    assert FrontendConfig(engine=("a:1",)).engines == "the engine at a:1"
    assert FrontendConfig(engine=("a:1", "b:2")).engines == "the engines at a:1, b:2"
