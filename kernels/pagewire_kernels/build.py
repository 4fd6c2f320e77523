"""Builds the C++ kernels for this machine: `python -m pagewire_kernels.build`.

The result lies in a per-user cache folder under a name that tells sources, flags and processor
apart, so that a changed source or another machine on a shared home never loads a stale library;
`--force` builds it again, after a change of the compiler. The library has
a plain C interface: it fits any torch version.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
_COMPILERS = ("g++", "c++", "clang++")
# -ffp-contract=fast: fused multiply-adds, which -std=c++20 would forbid GCC to form.
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
)
_BUILD_TIMEOUT_S = 300


class KernelBuildError(RuntimeError):
    """The kernels could not be built; the message says why and what to do."""


def find_compiler() -> str | None:
    """Path of the C++ compiler: the one CXX names, else the first usual one."""
    named = os.environ.get("CXX")
    candidates = (named,) if named else _COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def library_path() -> Path:
    """Where the library for these sources and this processor is, or would be built."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    digest.update(_processor().encode())
    return _cache_dir() / f"cpu-{digest.hexdigest()[:16]}.so"


def build(*, force: bool = False) -> Path:
    """Builds the library unless it is there.

    Args:
        force: build it again even so.

    Returns:
        Its path.

    Raises:
        KernelBuildError: no compiler, or it refused the sources.
    """
    path = library_path()
    if path.exists() and not force:
        return path
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(
            "no C++ compiler was found (looked for CXX, "
            + ", ".join(_COMPILERS)
            + "): install g++ 12 or newer, or set CXX"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed into it: another process never loads half a library.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch) / path.name
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [compiler, *_FLAGS, "-c", "-o", str(target), str(source)]
                for source, target in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        _run([compiler, *_FLAGS, "-shared", "-o", str(output), *map(str, objects)])
        output.replace(path)
    return path


def main() -> int:
    """Command line: builds, and says where the library is."""
    force = "--force" in sys.argv[1:]
    if force or not library_path().exists():
        print("Building the C++ kernels (up to a minute) ...", flush=True)
    try:
        path = build(force=force)
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
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists():
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    first_processor = cpu_info.read_text().split("\n\n")[0].splitlines()
    lines = [line for line in first_processor if line.startswith(names)]
    return platform.machine() + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
