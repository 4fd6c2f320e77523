"""What a start on a GPU maps is read ahead, and nothing elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pagewire_engine import read_ahead


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_the_libraries_are_those_that_torch_maps() -> None:
    import torch

    files = list(read_ahead.library_files())
    lib = Path(torch.__file__).parent / "lib"
    assert lib / "libtorch_cpu.so" in files
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize(("device", "has_driver"), [("cpu", True), ("auto", False)])
def test_nothing_is_read_where_no_gpu_is_meant(
    device: str, has_driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(read_ahead, "_DRIVER", driver)
    monkeypatch.setattr(read_ahead, "_read", lambda files: pytest.fail("read"))
    read_ahead.read_ahead(device)
    assert not threads()


def test_files_are_advised_one_after_another_and_missing_ones_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("a", "missing", "b")]
    files[0].write_bytes(b"x")
    files[2].write_bytes(b"y")
    advised: list[int] = []
    done = threading.Event()

    def advise(opened: int, start: int, length: int, advice: int) -> None:
        assert (start, length) == (0, 0)
        advised.append(opened)
        if len(advised) == 2:
            done.set()

    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(read_ahead, "_DRIVER", driver)
    monkeypatch.setattr(read_ahead, "library_files", lambda: iter(files))
    monkeypatch.setattr(read_ahead.os, "posix_fadvise", advise)
    read_ahead.read_ahead("cuda")
    assert done.wait(20)
