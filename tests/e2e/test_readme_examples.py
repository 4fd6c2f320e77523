"""Every example of the README does what it says, against a live server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pagewire.config import EngineConfig
from pagewire.settings import parse_settings
from pagewire_frontend.bench.settings import BenchSettings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_settings import ServeSettings
from pagewire_ui.config import UiConfig
from tests.e2e.serve_process import Served, ServeProcess
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "sh"]
COMMANDS = [line for text in SHELL for line in text.splitlines() if not text.startswith("curl")]
CURL = [text for text in SHELL if text.startswith("curl")]


def at_its_ports(example: str, served: Served) -> str:
    """The example with this server's ports in place of the usual ones."""
    return example.replace("http://localhost:8000", served.http).replace(
        "localhost:50051", served.grpc
    )


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_examples_are_all_of_a_kind_that_is_tested() -> None:
    assert len(CURL) == 2
    assert len(PYTHON) == 4
    assert {language for language, _ in BLOCKS} == {"sh", "python", "yaml", "text"}


def test_curl_is_answered(served: Served, tmp_path: Path) -> None:
    answer = run(["bash", "-c", f"curl -sSf{at_its_ports(CURL[0], served)[4:]}"], tmp_path)
    assert "Paris" in answer


@pytest.mark.slow
def test_the_adapter_is_served_and_answers(tmp_path: Path, smollm2_path: Path) -> None:
    (command,) = [line for line in COMMANDS if "--enable-lora" in line]
    (arguments,) = re.findall(r'ARGS="(.*)"', command)
    flags = arguments.replace("tests/adapters", str(ROOT / "tests/adapters")).split()
    flags += ["--http-port=0", "--grpc-port=0", f"--ui-port={free_port()}"]
    with ServeProcess([f"--model={smollm2_path}", *flags], cwd=tmp_path) as process:
        example = at_its_ports(CURL[1], Served(process))
        answer = run(["bash", "-c", f"curl -sSf{example[4:]}"], tmp_path)
    assert '"model":"pirate"' in answer
    assert "arr" in answer.lower()


@pytest.mark.parametrize("example", PYTHON, ids=["openai", "grpc", "offline", "structured"])
def test_python_examples_answer(served: Served, tmp_path: Path, example: str) -> None:
    program = tmp_path / "example.py"
    program.write_text(at_its_ports(example, served))
    assert "Paris" in run([sys.executable, str(program)], tmp_path)


def test_commands_have_flags_that_exist() -> None:
    programs = {
        "pagewire serve": (ServeSettings, ["model"]),
        "pagewire bench": (BenchSettings, ["model"]),
        "engine-service": (EngineConfig, ["model"]),
        "pagewire-frontend": (FrontendConfig, ["engine"]),
        "pagewire-ui": (UiConfig, []),
    }
    seen = set()
    for line in COMMANDS:
        environment = re.match(r"(?:[A-Z_]+=(?:\$\([^)]*\)|\S+) +)*", line)
        assert environment is not None
        program, *arguments = shlex.split(line[environment.end() :])
        if program == "pagewire":
            program = f"pagewire {arguments.pop(0)}"
        if program in programs:
            config, positional = programs[program]
            parse_settings(
                config, arguments, prog=program, description="", positional=positional, environ={}
            )
            seen.add(program)
        else:
            assert program in ("make", "docker"), line
    assert seen == programs.keys()


def test_the_settings_file_of_the_readme_is_accepted(tmp_path: Path) -> None:
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    (tmp_path / "settings.yaml").write_text(text)
    settings = parse_settings(
        ServeSettings,
        ["--config", str(tmp_path / "settings.yaml")],
        prog="pagewire serve",
        description="",
        environ={},
    )
    assert len(settings.model_fields_set) == len(yaml.safe_load(text))
