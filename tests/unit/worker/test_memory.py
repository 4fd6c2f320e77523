"""How much memory a container leaves, and a GPU after its largest step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewire.errors import InvalidArgumentError
from pagewire_engine.worker import memory
from pagewire_engine.worker.memory import (
    DeviceMemory,
    available_bytes,
    default_swap_bytes,
    gib,
    measure_largest_step,
)

MIB = 1 << 20
GIB = 1 << 30


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


def test_the_limit_of_a_service_or_of_what_it_is_in_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/engine.service/worker\n")
    service = tmp_path / "system.slice" / "engine.service"
    (service / "worker").mkdir(parents=True)
    container(service, str(64 * MIB), 24 * MIB, 0)
    container(service / "worker", "max", 24 * MIB, 0)
    assert available_bytes(tmp_path, own) == 40 * MIB
    container(service / "worker", str(30 * MIB), 24 * MIB, 0)
    assert available_bytes(tmp_path, own) == 6 * MIB


@pytest.mark.parametrize("group", ["/", "/docker/0123", "/../elsewhere"])
def test_version_1_keeps_memory_in_a_tree_of_its_own(tmp_path: Path, group: str) -> None:
    """A container's files are at the root of its mount, whatever group the kernel names."""
    own = tmp_path / "own"
    own.write_text(f"12:cpu,cpuacct:{group}\n5:memory:{group}\n0::/\n")
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{50 * MIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {20 * MIB}\n")
    assert available_bytes(tmp_path, own) == 34 * MIB


def test_a_cpus_kv_cache_is_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GIB)
    assert memory.default_cpu_cache_bytes() == int(0.4 * 8 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * GIB)
    assert memory.default_cpu_cache_bytes() == 4 * GIB


def test_host_memory_for_swap_is_a_tenth_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GIB)
    assert default_swap_bytes("cuda") == int(0.8 * GIB)
    assert default_swap_bytes("cpu") == int(0.8 * GIB)
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * GIB)
    assert default_swap_bytes("cuda") == 4 * GIB
    assert default_swap_bytes("cpu") == GIB


def test_a_gpus_share_less_weights_step_and_strangers_is_left() -> None:
    measured = DeviceMemory(total=80 * GIB, used=30 * GIB, outside=2 * GIB)
    assert measured.left(0.5) == 8 * GIB


def test_nothing_left_names_the_flag_and_the_numbers() -> None:
    measured = DeviceMemory(total=80 * GIB, used=70 * GIB, outside=3 * GIB)
    with pytest.raises(InvalidArgumentError) as raised:
        measured.left(0.9)
    assert raised.value.field == "gpu_memory_utilization"
    for part in ("0.9 of 80.0 GiB allows 72.0 GiB", "take 70.0 GiB", "GPU 3.0 GiB", "max_num_seqs"):
        assert part in raised.value.message


class FakeCuda:
    """What `torch.cuda` would tell of a card of 100 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (25, 100))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 60)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 45)


def test_the_peak_of_the_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    measured = measure_largest_step(lambda: cuda.calls.append("run"), torch.device("cuda", 0))
    assert measured == DeviceMemory(total=100, used=60, outside=30)
    expected = ["empty_cache", "reset_peak_memory_stats", "run", "synchronize", "empty_cache"]
    assert cuda.calls == expected


def test_a_step_too_large_for_the_card_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)

    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InvalidArgumentError, match=r"^max_num_batched_tokens: .*25 bytes.*lower"):
        measure_largest_step(run, torch.device("cuda", 0))


def test_sizes_are_told_in_a_unit_that_fits() -> None:
    assert [gib(3 * GIB // 2), gib(3 * MIB), gib(900)] == ["1.5 GiB", "3.0 MiB", "900 bytes"]
