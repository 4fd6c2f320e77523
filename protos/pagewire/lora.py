"""LoRA adapters as settings and offline calls name them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pagewire.errors import InvalidArgumentError

MAX_ADAPTER_NAME_LENGTH = 256
_FORM = 'must be name=folder, or JSON such as {"name": "a", "path": "folder"}'


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that is loaded when an engine starts.

    Attributes:
        name: what requests call it.
        path: its folder.
        base_model_name: what it was trained on; "": the served model.
    """

    name: str
    path: str
    base_model_name: str = ""

    @classmethod
    def parse(cls, text: str) -> LoraModule:
        """From `name=folder` or a JSON object.

        Raises:
            ValueError: it is neither.
        """
        if text.lstrip().startswith("{"):
            return cls._from_json(text)
        name, found, path = text.partition("=")
        if not (found and path):
            raise ValueError(f"{_FORM}, not {text!r}")
        return cls(checked_name(name), path)

    @classmethod
    def _from_json(cls, text: str) -> LoraModule:
        try:
            fields: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{_FORM}; {text!r} is not JSON") from None
        known = {"name", "path", "base_model_name"}
        if not isinstance(fields, dict) or not {"name", "path"} <= set(fields) <= known:
            raise ValueError(f"{_FORM}, with base_model_name at will, and not {text!r}")
        values = {key: value for key, value in fields.items() if value is not None}
        if not all(isinstance(value, str) and value for value in values.values()):
            raise ValueError(f"{_FORM}: its values must be texts, in {text!r}")
        return cls(checked_name(values["name"]), values["path"], values.get("base_model_name", ""))


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that an offline call runs with; as vLLM's class of this name.

    Attributes:
        lora_name: its name. Another folder, or other content, under the same name replaces it.
        lora_int_id: taken so that code written for vLLM runs; adapters are told apart by name and
            content.
        lora_path: its folder.
        base_model_name: what it was trained on.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        try:
            checked_name(self.lora_name)
        except ValueError as error:
            raise InvalidArgumentError("lora_name", str(error)) from None
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidArgumentError("lora_path", "must name the adapter's folder")


def checked_name(name: Any) -> str:
    """An adapter's name.

    Raises:
        ValueError: it can't be one.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ADAPTER_NAME_LENGTH:
        raise ValueError(f"a name has 1 to {MAX_ADAPTER_NAME_LENGTH} characters")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"a name is printable, without spaces around it, not {name!r}")
    return name
