"""Asks pip-audit whether a version in constraints-cpu.txt has a known fault: `make audit`.

Ends with 1 where one has, and with 0 where none has or no source of advisories can be reached: that
is said. pip-audit itself ends well where an index knows no package at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints-cpu.txt"
SOURCES = ("pypi", "osv")


def verdict(dependencies: list[dict[str, Any]]) -> tuple[list[str], int]:
    """What pip-audit's report says: a line for each known fault, and how many packages its source
    knew."""
    known = [one for one in dependencies if "skip_reason" not in one]
    faults = [
        f"{one['name']} {one['version']}: {fault['id']} (fixed in "
        f"{', '.join(fault['fix_versions']) or 'no version'})"
        for one in known
        for fault in one["vulns"]
    ]
    return faults, len(known)


def ask(program: str, source: str) -> list[dict[str, Any]] | None:
    """pip-audit's report by one source; None where that can't be reached."""
    # torch's local version, and the build of it that is for the CPU, are in no list of advisories.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(CONSTRAINTS.read_text().replace("+cpu", ""))
        file.flush()
        command = [program, "--requirement", file.name, "--no-deps", "--disable-pip"]
        command += ["--vulnerability-service", source, "--format", "json", "--timeout", "10"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # pip-audit could not be installed either
            return None
    try:
        return list(json.loads(result.stdout)["dependencies"])
    except (json.JSONDecodeError, KeyError):
        return None


def main(program: str) -> int:
    """Asks one source after the other, until one knows packages."""
    total = sum("==" in line for line in CONSTRAINTS.read_text().splitlines())
    for source in SOURCES:
        faults, num_known = verdict(ask(program, source) or [])
        if num_known:
            print(f"pip-audit: {source} knows {num_known} of {total} packages")
            print("\n".join(faults) or "pip-audit: no known fault in them")
            return 1 if faults else 0
    print(f"pip-audit: NOT AUDITED: neither of {', '.join(SOURCES)} can be reached from here")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
