"""Schemas as people write them, from the packages that are installed: nearly all are kept, and what
is written under them meets them. `python -m tests.bench.schemas` asks a real model the same."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, PydanticUserError

from pagewire.errors import PagewireError
from pagewire.structured_output import MAX_CONSTRAINT_BYTES
from tests.fakes.constrained_walks import EOS, Grammars, StuckError, walk

NUM_SCHEMAS = 60


def _sources() -> dict[str, Callable[[], dict[str, Any]]]:
    """Models of the openai package's requests and answers, and the metaschemas of all drafts."""
    package = importlib.import_module("openai.types")
    sources: dict[str, Callable[[], dict[str, Any]]] = {}
    for module in pkgutil.walk_packages(package.__path__, "openai.types."):
        for name, model in vars(importlib.import_module(module.name)).items():
            is_model = isinstance(model, type) and issubclass(model, BaseModel)
            if is_model and model.__module__ == module.name:
                sources[f"{module.name}.{name}"] = model.model_json_schema
    for validator in (
        jsonschema.Draft4Validator,
        jsonschema.Draft6Validator,
        jsonschema.Draft7Validator,
    ):
        sources[validator.__name__] = partial(dict, validator.META_SCHEMA)
    return sources


def sample(number: int = NUM_SCHEMAS) -> list[tuple[str, dict[str, Any]]]:
    """Those whose names have the lowest hashes: as good as by lot, and the same each time."""
    sources = _sources()
    assert len(sources) > 200
    found: list[tuple[str, dict[str, Any]]] = []
    for name in sorted(sources, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        # Each takes its time to be written, and there are hundreds.
        with suppress(PydanticUserError):
            found.append((name, sources[name]()))
        if len(found) == number:
            break
    return found


@pytest.mark.slow
def test_schemas_of_installed_packages_are_kept() -> None:
    grammars = Grammars()
    refused: dict[str, str] = {}
    num_written = 0
    for name, schema in sample():
        if len(json.dumps(schema)) > MAX_CONSTRAINT_BYTES:
            continue
        try:
            grammar = grammars.compiled(schema)
        except PagewireError as error:
            refused[name] = error.message
            continue
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        for seed in range(2):
            try:
                output = walk(grammar.matcher(), grammars.tokens.of, EOS, seed, most=2500)
            except StuckError:
                continue
            if output is not None:
                kind(schema).validate(json.loads(output))
                num_written += 1
    assert len(refused) <= NUM_SCHEMAS // 10, refused
    assert num_written > NUM_SCHEMAS
