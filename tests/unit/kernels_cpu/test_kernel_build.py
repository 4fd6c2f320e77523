"""Building the C++ kernels, and what happens where they are missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagewire_kernels import build, cpu, matrix_registers
from pagewire_kernels.attention import BackendUnavailableError, load_attention_backend
from pagewire_kernels.background_build import BackgroundBuild
from pagewire_kernels.cpu_dense import CpuDense
from pagewire_kernels.quantization import quantize_int8
from pagewire_kernels.sampling import TorchChooser, load_token_chooser


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path))
    cpu.load_library.cache_clear()
    yield tmp_path
    cpu.load_library.cache_clear()


def test_missing_kernels_asked_for_by_name_say_how_to_build_them(nothing_built: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"python -m pagewire_kernels\.build"):
        load_attention_backend("cpu", "cpu")


def test_missing_kernels_leave_auto_to_torch_and_build_nothing(nothing_built: Path) -> None:
    assert load_attention_backend("auto", "cpu").name == "torch"
    assert isinstance(load_token_chooser("cpu"), TorchChooser)
    assert not list(nothing_built.rglob("*.so"))


@pytest.mark.usefixtures("built_kernels")
def test_built_kernels_are_what_auto_takes() -> None:
    assert load_attention_backend("auto", "cpu").name == "cpu"
    assert isinstance(load_token_chooser("cpu"), cpu.CpuChooser)


@pytest.mark.usefixtures("built_kernels")
def test_a_second_build_finds_the_first() -> None:
    path = build.library_path()
    modified = path.stat().st_mtime_ns
    assert build.build() == path
    assert path.stat().st_mtime_ns == modified


def test_the_cpu_backend_refuses_other_devices() -> None:
    with pytest.raises(BackendUnavailableError, match="--attention-backend torch"):
        cpu.load_backend(torch.device("cuda"))


def test_a_compiler_that_is_not_there_is_named(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.KernelBuildError, match="CXX"):
        build.build()


def test_a_failing_compiler_is_quoted_and_leaves_nothing_behind(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = nothing_built / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'vec.h:1: no such intrinsic' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.KernelBuildError, match=r"exit code 3[\s\S]*no such intrinsic"):
        build.build()
    assert not list(nothing_built.rglob("*.so"))


@pytest.mark.parametrize("allowed", [True, False])
def test_a_processor_gets_the_best_level_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(matrix_registers, "request_permission", lambda: allowed)
    amx, bf16, vnni, v4, v3, base = build.X86_LEVELS
    some = sorted(v4.features - {"avx512vl"})
    for level, flags in [
        (amx if allowed else bf16, [*sorted(amx.features), "amx_fp16"]),
        (bf16, [*sorted(bf16.features), "amx_tile"]),
        (vnni, [*sorted(vnni.features), "amx_tile"]),
        (v4, [*sorted(v4.features), "avx_vnni"]),
        (v3, some),
        (v3, sorted(v3.features)),
        (base, sorted(v3.features - {"fma"})),
        (base, []),
    ]:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {' '.join(flags)}\n\n")
        assert build.own_level() == level
    assert len({build.library_path(level) for level in build.X86_LEVELS}) == 6


@pytest.mark.usefixtures("built_kernels")
@pytest.mark.parametrize("level", build.X86_LEVELS[1:], ids=lambda level: level.name)
def test_lower_levels_compute_the_same(level: build.Level) -> None:
    if not level.features <= build._features():
        pytest.skip("not an x86 processor of this level")
    dense = CpuDense(cpu.load_library(build.build(level)))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 70, generator=generator), torch.randn(50, 70)
    for narrow in (weight, weight.bfloat16(), weight.half()):
        got = dense.linear(hidden, dense.pack(narrow))
        rounds = narrow.dtype == torch.bfloat16 and "avx512_bf16" in level.features
        inputs = hidden.bfloat16().float() if rounds else hidden
        torch.testing.assert_close(got, inputs @ narrow.float().t(), atol=1e-4, rtol=1e-5)
    rounded = quantize_int8(weight)
    got = dense.linear(hidden, dense.pack(rounded))
    # Inputs are rounded to 16 bits.
    torch.testing.assert_close(got, hidden @ rounded.dequantized().t(), atol=2e-3, rtol=1e-4)


def test_the_command_line_reports_failure(nothing_built: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagewire_kernels.build"],
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "no C++ compiler was found" in result.stderr
    assert "Building the C++ kernels" in result.stdout  # what takes long is told before


def test_what_killed_builds_left_is_removed_and_what_runs_is_not(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build.library_path().parent
    for name, age_days in (("tmpold", 2), ("tmpnew", 0), ("other", 2)):
        (folder / name).mkdir(parents=True)
        (folder / name / "half.o").touch()
        then = time.time() - age_days * 24 * 3600
        os.utime(folder / name, (then, then))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.KernelBuildError, match="exit code 1"):
        build.build()
    assert sorted(path.name for path in folder.iterdir()) == ["other", "tmpnew"]


def test_an_unforeseen_error_is_a_failed_build_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def builder() -> Path:
        raise RuntimeError("unforeseen")

    background = BackgroundBuild(builder)
    with pytest.raises(build.KernelBuildError, match="unforeseen"):
        background.result()
    assert background.ended
    assert "the build of the C++ kernels failed" in caplog.text


def test_a_process_that_ends_does_not_wait_for_its_background_build(nothing_built: Path) -> None:
    compiler, started, gate = (nothing_built / name for name in ("compiler", "started", "gate"))
    compiler.write_text(f"#!/bin/sh\ntouch {started}\nwhile [ -e {gate} ]; do sleep 0.05; done\n")
    compiler.chmod(0o755)
    gate.touch()
    code = f"""
import os, time
from pagewire_kernels.background_build import BackgroundBuild
BackgroundBuild()
while not os.path.exists({str(started)!r}):
    time.sleep(0.01)
"""
    try:
        environment = {**os.environ, "CXX": str(compiler)}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, timeout=60, check=True
        )
    finally:
        gate.unlink()
    assert ended.returncode == 0
