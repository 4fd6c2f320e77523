"""The files below deploy/ are well-formed and agree with the programs they start."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from pagewire.config import EngineConfig
from pagewire.settings import parse_settings
from pagewire_frontend import health_check
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.serve_settings import ServeSettings
from pagewire_ui.config import UiConfig

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
PROGRAMS: dict[str, type[BaseModel]] = {
    "engine": EngineConfig,
    "engine-cpu": EngineConfig,
    "frontend": FrontendConfig,
    "ui": UiConfig,
    "serve": ServeSettings,
}
IMAGES = {"engine", "engine-cpu", "frontend", "ui", "serve"}
INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE"} | {
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}


def instructions() -> Iterator[tuple[str, str, str]]:
    """(stage, instruction, arguments) of the Dockerfile, continuation lines joined."""
    text = re.sub(r"\\\n", " ", (DOCKER / "Dockerfile").read_text())
    stage = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            stage = arguments.split(" AS ")[1]
        yield stage, name, arguments.strip()


def entrypoint(stage: str) -> list[str]:
    (found,) = [
        args for where, name, args in instructions() if (where, name) == (stage, "ENTRYPOINT")
    ]
    return list(json.loads(found))


def settings(program: str, flags: list[str]) -> BaseModel:
    return parse_settings(PROGRAMS[program], flags, prog=program, description="", environ={})


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


def test_the_dockerfile_is_well_formed() -> None:
    stages: list[str] = []
    for stage, name, arguments in instructions():
        assert name in INSTRUCTIONS, f"{name} {arguments}"
        if name == "FROM":
            image = arguments.split()[0]
            assert image in (*stages, "${PYTHON}")
            stages.append(stage)
        if name == "COPY":
            words = [word for word in arguments.split() if not word.startswith("--")]
            origin = re.search(r"--from=([\w-]+)", arguments)
            if origin:
                assert origin[1] in stages
            else:
                assert all((ROOT / source).exists() for source in words[:-1]), arguments
        if name == "RUN":
            shell = ["bash", "-n", "-c", arguments]
            assert subprocess.run(shell, check=False).returncode == 0, arguments
        if name == "HEALTHCHECK":
            command = json.loads(arguments.split("CMD", 1)[1])
            program, flag, module, *asked = command
            assert (program, flag, module) == ("python", "-m", health_check.__name__)
            assert health_check._parser().parse_args(asked)
    assert IMAGES.issubset(stages)


def test_hadolint_finds_nothing_to_blame() -> None:
    result = subprocess.run(
        [shutil.which("hadolint", path=sysconfig.get_path("scripts")) or "hadolint", "--config",
         str(DOCKER / "hadolint.yaml"), str(DOCKER / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout


def test_what_the_dockerfile_copies_is_in_its_context() -> None:
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")
    }
    for _, name, arguments in instructions():
        if name == "COPY" and "--from" not in arguments:
            words = [word for word in arguments.split() if not word.startswith("--")]
            assert kept.issuperset(words[:-1])


@pytest.mark.parametrize("stage", sorted(IMAGES))
def test_images_run_without_rights_and_say_their_health(stage: str) -> None:
    mine = [(name, arguments) for where, name, arguments in instructions() if where == stage]
    assert [arguments for name, arguments in mine if name == "USER"][-1] == "10001:10001"
    assert [name for name, _ in mine].count("HEALTHCHECK") == 1
    flags = [word for word in entrypoint(stage) if word.startswith("--")]
    required = ["--model=m"] if stage.startswith("engine") else []
    assert settings(stage, [*flags, *required])


def test_compose_services_join_up() -> None:
    services = compose()["services"]
    assert services.keys() == {"engine", "frontend", "ui"}
    for name, service in services.items():
        assert service["build"]["target"] == name
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
        flags = [re.sub(r"\$\{MODEL.*\}", "m", flag) for flag in service["command"]]
        assert settings(name, flags)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")  # nothing is published beyond the machine
    frontend = settings("frontend", services["frontend"]["command"])
    assert isinstance(frontend, FrontendConfig)
    assert [engine.split(":")[0] for engine in frontend.engine] == ["engine"]


def test_compose_services_have_no_rights_and_write_to_memory_or_volumes_alone() -> None:
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        places = [place.partition(":")[0] for place in service["tmpfs"]]
        places += [volume.split(":")[1] for volume in service.get("volumes", [])]
        assert {"/tmp", "/cache"} <= set(places)


def test_compose_services_may_end_their_streams_when_they_are_stopped() -> None:
    for service in compose()["services"].values():
        seconds = float(service["stop_grace_period"].removesuffix("s"))
        assert seconds > 2 * FrontendConfig().grace_period_s


def test_compose_s_memory_filesystems_are_such_as_podman_takes_too() -> None:
    # Docker takes a user's and a group's number as well.
    for service in compose()["services"].values():
        options = [place.partition(":")[2] for place in service["tmpfs"]]
        assert set(options) == {"mode=1777"}


def test_the_cpu_variant_resets_the_gpu_and_takes_the_smaller_image() -> None:
    text = (DOCKER / "compose.cpu.yaml").read_text()
    assert "deploy: !reset null" in text
    assert "deploy" in compose()["services"]["engine"]
    variant = yaml.safe_load(text.replace("!reset null", "null"))
    assert variant["services"]["engine"]["build"]["target"] == "engine-cpu"


def test_the_systemd_unit_is_well_formed() -> None:
    path = ROOT / "deploy" / "systemd" / "pagewire.service"
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keep the case of keys
    unit.read(path)
    assert unit.sections() == ["Unit", "Service", "Install"]
    program, command, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("pagewire", "serve")
    assert [flag.split("=")[0] for flag in flags] == ["--config"]
    if analyze := shutil.which("systemd-analyze"):
        result = subprocess.run(
            [analyze, "verify", "--recursive-errors=no", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        # The program is not installed where the unit will look for it; all else is an error.
        complaints = [line for line in result.stderr.splitlines() if "pagewire.service" in line]
        assert not [line for line in complaints if "is not executable" not in line]
