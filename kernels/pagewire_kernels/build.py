"""Builds the C++ kernels: `python -m pagewire_kernels.build`.

On x86 there are six levels of instructions, each a library of its own for every processor that
has them; `--all-levels` builds them all, for an image that runs elsewhere. Which one is loaded is
decided where it runs. Other processors get what the compiler makes for the one it runs on.

The result lies in a per-user cache folder under a name that tells sources, flags and, where it
matters, the processor apart, so that a changed source or another machine on a shared home never
loads a library that does not fit; `--force` builds it again, after a change of the compiler. The
library has a plain C interface: it fits any torch version.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagewire_kernels import matrix_registers

SOURCE_DIR = Path(__file__).parent / "csrc"
# Libraries that an image brings with it, where no compiler has to be.
SHIPPED_DIR = Path(__file__).parent / "built"
_CPU_INFO = Path("/proc/cpuinfo")
_COMPILERS = ("g++", "c++", "clang++")
# -ffp-contract=fast: fused multiply-adds, which -std=c++20 would forbid GCC to form.
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-pthread",
    "-fPIC",
)
_BUILD_TIMEOUT_S = 600
# Older scratch folders are of builds that were killed.
_SCRATCH_PREFIX = "tmp"
_SCRATCH_MAX_AGE_S = 24 * 3600
# Behind the engine, but not so far that a busy one starves the compiler: about a quarter of a core.
_PATIENCE = "5"


@dataclass(frozen=True)
class Level:
    """A set of instructions.

    Attributes:
        name: part of the library's file name.
        flags: the compiler's options.
        features: what /proc/cpuinfo says of a processor that has them.
        processor: what else the result depends on.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()
    processor: str = ""


# The levels of the x86-64 psABI, best first, and three with products of integers, of bfloat16 and
# of tiles of either. They are separate libraries, since parts of the C++ library that the compiler
# puts into each object are merged when linked: with the wrong one's instructions.
_TILES = frozenset(["amx_tile", "amx_bf16", "amx_int8"])
_X86_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_X86_V4 = _X86_V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_X86_V4_BF16 = _X86_V4 | frozenset(["avx512_vnni", "avx512_bf16"])
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
X86_LEVELS = (
    Level(
        "x86-64-v4-amx",
        (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _X86_V4_BF16 | _TILES,
    ),
    Level("x86-64-v4-bf16", _BF16_FLAGS, _X86_V4_BF16),
    Level(
        "x86-64-v4-vnni",
        ("-march=x86-64-v4", "-mavx512vnni"),
        _X86_V4 | frozenset(["avx512_vnni"]),
    ),
    Level("x86-64-v4", ("-march=x86-64-v4",), _X86_V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _X86_V3),
    Level("x86-64", ("-march=x86-64",)),
)


class KernelBuildError(RuntimeError):
    """The kernels could not be built; the message says why and what to do."""


def find_compiler() -> str | None:
    """Path of the C++ compiler: the one CXX names, else the first usual one."""
    named = os.environ.get("CXX")
    candidates = (named,) if named else _COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def own_level() -> Level:
    """The best level of this machine's processor."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not _CPU_INFO.exists():
        return Level("native", ("-march=native",), processor=_processor())
    features = _features()
    return next(level for level in X86_LEVELS if level.features <= features)


def library_path(level: Level | None = None) -> Path:
    """Where the library for these sources and a level is: shipped, or where it would be built.

    Args:
        level: default: this machine's.
    """
    level = level or own_level()
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(" ".join((*_FLAGS, *level.flags)).encode())
    digest.update(level.processor.encode())
    name = f"cpu-{level.name}-{digest.hexdigest()[:16]}.so"
    shipped = SHIPPED_DIR / name
    return shipped if shipped.exists() else _cache_dir() / name


def build(level: Level | None = None, *, force: bool = False, patiently: bool = False) -> Path:
    """Builds the library unless it is there.

    Args:
        level: default: this machine's.
        force: build it again even so.
        patiently: one compiler at a time, with low priority, and no threads but the caller's.

    Returns:
        Its path.

    Raises:
        KernelBuildError: no compiler, or it refused the sources, or the folder can't be written.
    """
    level = level or own_level()
    path = library_path(level)
    if path.exists() and not force:
        return path
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(
            "no C++ compiler was found (looked for CXX, "
            + ", ".join(_COMPILERS)
            + "): install g++ 12 or newer, or set CXX"
        )
    nice = shutil.which("nice") if patiently else None
    command = [*([nice, "-n", _PATIENCE] if nice else []), compiler, *_FLAGS, *level.flags]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        # Built beside its place and renamed into it: another process never loads half a library.
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=path.parent) as scratch:
            output = Path(scratch) / path.name
            _compile(command, output, 1 if patiently else os.cpu_count() or 1)
            output.replace(path)
    except OSError as error:
        raise KernelBuildError(
            f"{path.parent} can't be written ({error}): make it writable, or name another folder "
            "by PAGEWIRE_CACHE"
        ) from error
    return path


def _compile(command: Sequence[str], output: Path, jobs: int) -> None:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    objects = [output.parent / f"{source.stem}.o" for source in sources]
    commands = [
        [*command, "-c", "-o", str(target), str(source)]
        for source, target in zip(sources, objects, strict=True)
    ]
    if jobs == 1:
        # Not by an executor, whose threads a process that ends would wait for.
        for one in commands:
            _run(one)
    else:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_run, commands))
    _run([*command, "-shared", "-o", str(output), *map(str, objects)])


def _sweep(folder: Path) -> None:
    """Removes what killed builds left there."""
    oldest = time.time() - _SCRATCH_MAX_AGE_S
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another build sweeps too
            if scratch.is_dir() and scratch.stat().st_mtime < oldest:
                shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Command line: builds, and says where the library is."""
    parser = argparse.ArgumentParser(
        prog="python -m pagewire_kernels.build", description="Builds the C++ kernels for CPUs."
    )
    parser.add_argument("--force", action="store_true", help="build again what is there")
    parser.add_argument(
        "--all-levels",
        action="store_true",
        help="for every x86 processor, not only for this one: for images that run elsewhere",
    )
    arguments = parser.parse_args()
    levels = X86_LEVELS if arguments.all_levels else (own_level(),)
    if arguments.force or not all(library_path(level).exists() for level in levels):
        print("Building the C++ kernels (up to a minute) ...", flush=True)
    for level in levels:
        try:
            path = build(level, force=arguments.force)
        except KernelBuildError as error:
            print(f"pagewire_kernels: {error}", file=sys.stderr)
            return 1
        print(f"C++ kernels: {path}")
    return 0


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} could not be run: {error}") from error
    if result.returncode != 0:
        raise KernelBuildError(
            f"{' '.join(command)} failed with exit code {result.returncode}:\n"
            f"{result.stderr[-4000:]}"
        )


def _cache_dir() -> Path:
    own = os.environ.get("PAGEWIRE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else base / "pagewire") / "kernels"


def _processor() -> str:
    """What -march=native depends on."""
    if not _CPU_INFO.exists():
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    lines = [line for line in _first_processor() if line.startswith(names)]
    return platform.machine() + "\n".join(lines)


def _features() -> frozenset[str]:
    """What this process can do on this machine's processor, by the kernel's names."""
    lines = [line for line in _first_processor() if line.startswith("flags")]
    features = frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()
    if features >= _TILES and not matrix_registers.request_permission():
        return features - _TILES
    return features


def _first_processor() -> list[str]:
    return _CPU_INFO.read_text().split("\n\n")[0].splitlines()


if __name__ == "__main__":
    sys.exit(main())
