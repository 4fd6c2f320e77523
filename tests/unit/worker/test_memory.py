"""How much memory a container leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire_engine.worker.memory import available_bytes

MIB = 1 << 20


def container(folder: Path, limit: str, usage: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {cached}\ninactive_file {cached}\n")
    return folder


@pytest.mark.parametrize(
    ("usage", "cached", "available"),
    [(20 * MIB, 0, 44 * MIB), (64 * MIB, 40 * MIB, 40 * MIB), (70 * MIB, 0, 0)],
)
def test_files_that_were_read_leave_their_memory(
    tmp_path: Path, usage: int, cached: int, available: int
) -> None:
    assert available_bytes(container(tmp_path, str(64 * MIB), usage, cached)) == available


def test_a_container_without_a_limit_has_the_machines(tmp_path: Path) -> None:
    unlimited = available_bytes(container(tmp_path, "max", 20 * MIB, 0))
    assert unlimited > 64 * MIB
