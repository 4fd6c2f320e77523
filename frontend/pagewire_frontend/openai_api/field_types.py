"""Types of the fields of request bodies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _check_numbers(value: Any) -> Any:
    if isinstance(value, dict) and not all(type(item) in (int, float) for item in value.values()):
        raise ValueError("its values must be numbers")
    return value


# Pydantic collects an error for each item of a list or a mapping: of millions of wrong ones it
# would make errors for minutes, with all streams of this process waiting.
Texts = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_check_numbers)]
