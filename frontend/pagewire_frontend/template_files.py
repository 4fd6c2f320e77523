"""Where chat templates come from: a model's files, and what the operator names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagewire.errors import FailedPreconditionError
from pagewire_frontend.tokenizer import json_object

DEFAULT_TEMPLATE = "default"
_JINJA = ".jinja"
_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates/"


def load_chat_template(path_or_text: str) -> str:
    """A template's text: the content of a file, or the text itself where it is Jinja.

    Raises:
        FailedPreconditionError: neither a readable file nor a template.
    """
    if _is_jinja(path_or_text):
        return path_or_text
    try:
        with open(path_or_text, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(
            f"the chat template {path_or_text!r} is neither a readable file ({error}) nor a "
            "template's text",
            field="chat_template",
        ) from error


def load_chat_templates(path_or_text: str) -> dict[str, str]:
    """Templates by name: each NAME.jinja of a folder, or one, the default, as `load_chat_template`
    finds it. A folder's `chat_template.jinja` is its default too.

    Raises:
        FailedPreconditionError: neither a folder with templates, a readable file nor a template.
    """
    if _is_jinja(path_or_text) or not os.path.isdir(path_or_text):
        return {DEFAULT_TEMPLATE: load_chat_template(path_or_text)}
    files = sorted(Path(path_or_text).glob(f"*{_JINJA}"))
    if not files:
        raise FailedPreconditionError(
            f"the folder {path_or_text!r} holds no NAME{_JINJA}", field="chat_template"
        )
    return {
        DEFAULT_TEMPLATE if file.name == _FILE else file.stem: load_chat_template(str(file))
        for file in files
    }


def templates_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """A model's own templates, by name.

    Raises:
        FailedPreconditionError: a file is not what its name says.
    """
    # Later sources win, in the order of transformers: the config, then files of their own.
    templates = _by_name(_json(files, "tokenizer_config.json").get("chat_template"))
    templates |= _by_name(_json(files, "chat_template.json").get("chat_template"))
    if _FILE in files:
        templates[DEFAULT_TEMPLATE] = files[_FILE].decode("utf-8", "replace")
    for path, data in files.items():
        if path.startswith(_TEMPLATE_FOLDER):
            name = path.removeprefix(_TEMPLATE_FOLDER).removesuffix(_JINJA)
            templates[name] = data.decode("utf-8", "replace")
    return templates


def _by_name(entry: str | Sequence[Mapping[str, str]] | None) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT_TEMPLATE: entry}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (KeyError, TypeError):
        raise FailedPreconditionError(
            "the model's chat_template is neither a text nor a list of named templates; pass one "
            "with --chat-template",
            field="chat_template",
        ) from None


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return json_object(name, files[name]) if name in files else {}


def _is_jinja(text: str) -> bool:
    """Whether it is a template and no path."""
    return any(mark in text for mark in ("{{", "{%", "{#", "\n"))
