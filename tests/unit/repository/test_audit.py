"""CI's audit of the pinned versions: what it makes of pip-audit's reports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNKNOWN = {"name": "a", "skip_reason": "Dependency not found on PyPI and could not be audited"}
SOUND = {"name": "b", "version": "2", "vulns": []}
FAULTY = {"name": "c", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pip_audit(folder: Path, *reports: object) -> str:
    """A program that gives one report for each source, as pip-audit does; None: it has none."""
    for source, report in zip(("pypi", "osv"), reports, strict=True):
        text = "" if report is None else json.dumps({"dependencies": report, "fixes": []})
        (folder / source).write_text(text)
    program = folder / "pip-audit"
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --vulnerability-service ]; do shift; done\ncat "{folder}/$2"\n'
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("reports", "status", "said"),
    [
        (([SOUND, UNKNOWN], None), 0, "no known fault"),
        (([SOUND, FAULTY], None), 1, "c 1: PYSEC-1 (fixed in 1.1)"),
        # An index that knows nothing is no clean report.
        (([UNKNOWN], [FAULTY]), 1, "PYSEC-1"),
        (([UNKNOWN], None), 0, "NOT AUDITED"),
    ],
)
def test_only_what_was_audited_is_called_sound(
    audit: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reports: tuple[object, object],
    status: int,
    said: str,
) -> None:
    assert audit.main(pip_audit(tmp_path, *reports)) == status
    assert said in capsys.readouterr().out
