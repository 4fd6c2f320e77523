"""A model's JSON files, with errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagewire_engine.models.errors import ModelFileError


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        ModelFileError: it is missing, or no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{path.parent} has no {path.name}; download the model again", field="model"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path} can't be read ({error}); download it again", field="model"
        ) from error


def read_json_object(path: Path, *, required: bool) -> dict[str, Any]:
    """The object that a file holds; {} where there is none that is required.

    Raises:
        ModelFileError: it is missing, no JSON, or holds something else.
    """
    if not required and not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} does not hold a JSON object", field="model")
    return content
