"""Which folders under `--lora-dir` hold an adapter, without walking it anew for each who asks."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from pagewire_engine.adapters.files import CONFIG_FILE

_MOST_LISTED = 256
# Folders in a folder of adapters: their name, and a checkpoint below that.
_MOST_DEPTH = 2
# A folder may change once more within one tick of its file system's clock, and look the same.
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder as it was read.

    Attributes:
        changed_ns: when it had changed; 0: too recently to be relied on.
        holds_adapter: whether the config of one is in it.
        folders: names of those in it, sorted.
    """

    changed_ns: int
    holds_adapter: bool
    folders: tuple[str, ...]


class LoadablePaths:
    """The folders that adapters may be loaded from. May be asked from any thread.

    A folder that has not changed is not read again: only its time is looked at.

    Args:
        lora_dir: the setting; None: there are none.
    """

    def __init__(self, lora_dir: str | None) -> None:
        self._root = None if lora_dir is None else os.path.realpath(lora_dir)
        self._lock = threading.Lock()
        self._read: dict[str, _Folder] = {}

    def paths(self) -> list[str]:
        """By name, relative to `lora_dir`: the first 256."""
        if self._root is None:
            return []
        with self._lock:
            before, self._read = self._read, {}
            found: list[str] = []
            self._walk(self._root, ".", 0, before, found)
        return sorted(found)

    def _walk(
        self, path: str, relative: str, depth: int, before: dict[str, _Folder], found: list[str]
    ) -> None:
        folder = _look(path, before.get(path))
        if folder is None:
            return
        self._read[path] = folder
        if folder.holds_adapter:
            found.append(relative)
        if depth == _MOST_DEPTH:
            return
        for name in folder.folders:
            if len(found) >= _MOST_LISTED:
                return
            below = name if relative == "." else os.path.join(relative, name)
            self._walk(os.path.join(path, name), below, depth + 1, before, found)


def _look(path: str, before: _Folder | None) -> _Folder | None:
    """A folder, read only if it has changed since; None where it can't be read."""
    try:
        changed_ns = os.stat(path).st_mtime_ns
        if before is not None and before.changed_ns == changed_ns:
            return before
        with os.scandir(path) as found:
            entries = list(found)
        return _Folder(
            changed_ns if changed_ns < time.time_ns() - _SETTLED_NS else 0,
            any(entry.name == CONFIG_FILE for entry in entries),
            tuple(sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))),
        )
    except OSError:
        return None
