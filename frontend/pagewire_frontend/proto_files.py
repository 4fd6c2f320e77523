"""The .proto files that ship with the package, for clients in other languages."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def write_protos(out: Path) -> list[Path]:
    """Writes the .proto files below `out`, laid out as their imports name them.

    Args:
        out: a folder, made if it is not there; pass it as the include path (`-I`) to protoc.

    Returns:
        The files written.
    """
    folder = out / "pagewire" / "v1"
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for source in sorted(resources.files("pagewire.v1").iterdir(), key=lambda entry: entry.name):
        if source.name.endswith(".proto"):
            target = folder / source.name
            target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
            written.append(target)
    return written
