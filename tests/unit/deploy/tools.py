"""The programs of others that check what lies below deploy/."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "pagewire"
RULES = DEPLOY / "prometheus" / "pagewire.rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "pagewire.json"
# `make helm` puts it there.
_HELM = ROOT / ".venv" / "helm" / "helm"


def tool(name: str, remedy: str) -> str:
    """Path of a program; without it the test is left out, but not in CI, which installs them."""
    found = shutil.which(name) or (str(_HELM) if name == "helm" and _HELM.exists() else None)
    if found is None:
        message = f"{name} is not here: {remedy}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm; its messages, with what went wrong, are in stderr."""
    program = tool("helm", "make helm")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool."""
    program = tool("promtool", "apt-get install prometheus")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
