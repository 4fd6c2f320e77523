"""What the registry knows of an adapter, and what is asked of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.adapters.files import FolderState


class AdapterWorkers(Protocol):
    """The part of Executor that has to do with adapters."""

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription: ...

    def drop_adapter(self, number: int) -> None: ...

    def adapter_memory(self) -> AdapterMemory: ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be loaded.

    Attributes:
        name: what requests will call it.
        folder: its files.
        path: its folder as the caller named it.
        base_model_name: the model it was trained on; "": the served model.
        in_place: replace the adapter of this name.
        version: refuse content of another; "": take any.
        from_settings: loaded when the engine starts.
    """

    name: str
    folder: AdapterFolder
    path: str
    base_model_name: str = ""
    in_place: bool = False
    version: str = ""
    from_settings: bool = False


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One version of an adapter.

    Attributes:
        number: the engine's, never used again.
        name: what requests call it.
        folder: its files.
        folder_state: as they were before they were read; None: they may have changed unseen.
        path: its folder as it was named.
        parent: the model it was trained on.
        version: SHA-256 (hex) of its content.
        description: what its files say.
        files: of a tokenizer that it ships.
        from_settings: loaded when the engine started.
        loaded_at: Unix time, seconds.
        num_holds: requests that hold it.
        is_leaving: no request may name it any more.
    """

    number: int
    name: str
    folder: AdapterFolder
    folder_state: FolderState | None
    path: str
    parent: str
    version: str
    description: AdapterDescription
    files: Mapping[str, bytes]
    from_settings: bool
    loaded_at: int = field(default_factory=lambda: int(time.time()))
    num_holds: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class AdapterHold:
    """An adapter that a request holds until it has ended.

    Attributes:
        number: the engine's.
        version: in force.
        cache_key: what tells its keys and values from those of others.
    """

    number: int
    version: str
    cache_key: str


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload has done.

    Attributes:
        num_ended: requests that it ended.
        host_bytes, device_bytes: memory that came back.
    """

    num_ended: int
    host_bytes: int
    device_bytes: int


def version_of(description: AdapterDescription, files: Mapping[str, bytes]) -> str:
    """Of an adapter's whole content."""
    digest = hashlib.sha256(description.weights_version.encode())
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
