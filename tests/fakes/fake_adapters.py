"""Adapters for the fake executor: folders in which the config alone says what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.adapters.loaded import LoadedAdapter, LoadRequest
from pagewire_engine.adapters.registry import AdapterRegistry


def write_fake_adapter(folder: Path, content: str = "", **config: Any) -> Path:
    """A folder with an adapter; another content is another adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "content": content} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def load(registry: AdapterRegistry, name: str, folder: Path, **fields: Any) -> LoadedAdapter:
    """Loads an adapter from anywhere."""
    return registry.load(LoadRequest(name, AdapterFolder(str(folder)), str(folder), **fields))
