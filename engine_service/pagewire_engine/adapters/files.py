"""An adapter's files, found and read: never outside the folder they are confined to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.adapters.errors import (
    AdapterFileError,
    AdapterNotFoundError,
    UnsupportedAdapterError,
)
from pagewire_engine.tokenizer_files import read_tokenizer_folder

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MOST_JSON_BYTES = 1 << 20
# Of all its files.
_MOST_TOKENIZER_BYTES = 64 << 20
# Of a folder whose state is looked at.
_MOST_FILES = 256
# A file may change once more within one tick of its file system's clock, and look the same.
_SETTLED_S = 2.0

# Of each file of a folder: its name, size, the times of its last changes, and which it is.
FolderState = tuple[tuple[str, int, int, int, int], ...]


def resolve_folder(path: str, lora_dir: str | None) -> AdapterFolder:
    """The folder that a caller's path means, confined to `lora_dir`.

    Args:
        path: relative to `lora_dir`, or inside it.
        lora_dir: the setting.

    Raises:
        FailedPreconditionError: adapters are loaded from settings alone.
        InvalidArgumentError: the path leads elsewhere, links followed.
        AdapterNotFoundError: there is no such folder.
    """
    if lora_dir is None:
        raise FailedPreconditionError(
            "this engine loads adapters at its start alone (--lora-modules); start it with "
            "--lora-dir FOLDER to let them be loaded from there",
            field="path",
        )
    if not path or "\0" in path:
        raise InvalidArgumentError("path", "must name a folder under --lora-dir")
    root = os.path.realpath(lora_dir)
    folder = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([root, folder]) != root:
        # Nothing is said of what is there: not whether it exists, nor where a link leads.
        raise InvalidArgumentError("path", f"{path!r} is not under --lora-dir")
    if not os.path.isdir(folder):
        raise AdapterNotFoundError(f"there is no folder {path!r} under --lora-dir", field="path")
    return AdapterFolder(folder, root)


def anywhere(path: str) -> AdapterFolder:
    """The folder that the operator's path means.

    Raises:
        AdapterNotFoundError: there is no such folder.
    """
    folder = os.path.realpath(os.path.expanduser(path))
    if not os.path.isdir(folder):
        raise AdapterNotFoundError(
            f"there is no folder {path}; adapters are loaded from folders, and not from a hub: "
            "download it first",
            field="path",
        )
    return AdapterFolder(folder)


def file_in(folder: AdapterFolder, name: str) -> Path | None:
    """A file of the folder, links followed; None where there is none.

    Raises:
        AdapterFileError: it leads out of the root.
    """
    path = os.path.realpath(os.path.join(folder.path, name))
    if folder.root and os.path.commonpath([folder.root, path]) != folder.root:
        raise AdapterFileError(f"{name} leads out of --lora-dir")
    return Path(path) if os.path.isfile(path) else None


def read_config(folder: AdapterFolder) -> dict[str, Any]:
    """adapter_config.json.

    Raises:
        AdapterFileError: it is missing, or no JSON object.
    """
    path = file_in(folder, CONFIG_FILE)
    if path is None:
        raise AdapterFileError(
            f"the folder has no {CONFIG_FILE}: name the one that PEFT's save_pretrained wrote"
        )
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise AdapterFileError(f"{CONFIG_FILE} is larger than 1 MB")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterFileError(f"{CONFIG_FILE} can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"{CONFIG_FILE} is not JSON") from error
    if not isinstance(config, dict):
        raise AdapterFileError(f"{CONFIG_FILE} is not a JSON object")
    return config


def weights_file(folder: AdapterFolder) -> Path:
    """adapter_model.safetensors.

    Raises:
        UnsupportedAdapterError: there are only pickled weights.
        AdapterFileError: there are none.
    """
    path = file_in(folder, WEIGHTS_FILE)
    if path is not None:
        return path
    pickles = [name for name in _PICKLES if os.path.exists(os.path.join(folder.path, name))]
    if pickles:
        raise UnsupportedAdapterError(
            f"the folder has only {pickles[0]}, a pickle, which could run any code when it is "
            "read; load it where you trust it, and save it again by PEFT's "
            "save_pretrained(folder, safe_serialization=True)"
        )
    raise AdapterFileError(f"the folder has no {WEIGHTS_FILE}")


def tokenizer_files(folder: AdapterFolder) -> dict[str, bytes]:
    """The files of a tokenizer and its chat template that the adapter ships.

    Raises:
        AdapterFileError: one leads out of the root, or they are too large.
    """
    left = _MOST_TOKENIZER_BYTES

    def read(name: str) -> bytes | None:
        nonlocal left
        path = file_in(folder, name)
        if path is None:
            return None
        try:
            left -= path.stat().st_size
            if left < 0:
                raise AdapterFileError(
                    f"the files of its tokenizer and chat templates have more than "
                    f"{_MOST_TOKENIZER_BYTES >> 20} MiB together, {name} among them"
                )
            return path.read_bytes()
        except OSError as error:
            raise AdapterFileError(f"{name} can't be read ({error.strerror})") from error

    files = read_tokenizer_folder(Path(folder.path), read)
    # How it was trained says nothing of how the model's tokens are chosen.
    files.pop("generation_config.json", None)
    return files


def folder_state(folder: AdapterFolder) -> FolderState | None:
    """What tells whether a folder's files have changed; None where that can't be told."""
    found: list[tuple[str, int, int, int, int]] = []
    pending = [folder.path]
    try:
        while pending:
            path = pending.pop()
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        pending.append(entry.path)
                    status = entry.stat()
                    found.append(
                        (
                            os.path.relpath(entry.path, folder.path),
                            status.st_size,
                            status.st_mtime_ns,
                            status.st_ctime_ns,
                            status.st_ino,
                        )
                    )
                    if len(found) > _MOST_FILES:
                        return None
    except OSError:
        return None
    newest_s = max((max(each[2:4]) for each in found), default=0) / 1e9
    return tuple(sorted(found)) if newest_s < time.time() - _SETTLED_S else None
