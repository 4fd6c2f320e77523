"""What an output must look like: what is refused, by which name, and how it crosses the wires."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from pagewire import SamplingParams, StructuredOutput
from pagewire.conversion import (
    sampling_params_from_proto,
    sampling_params_to_proto,
    structured_output_from_proto,
)
from pagewire.errors import InvalidArgumentError
from pagewire.structured_output import MAX_CHOICES, MAX_CONSTRAINT_BYTES
from pagewire.v1 import sampling_pb2
from pagewire_engine.executor.plain_data import decode_plan, encode
from pagewire_engine.step import NewSequence, StepPlan

OF_EACH_KIND = [
    StructuredOutput(json_schema='{"type": "object"}'),
    StructuredOutput(json_schema='{"not": {}}', lenient=True),
    StructuredOutput(json_object=True),
    StructuredOutput(regex="[a-z]{3}é"),
    StructuredOutput(choice=("yes", "no", "🙂")),
    StructuredOutput(grammar='start: "a"+'),
    StructuredOutput(regex="a", reasoning_start="<think>", reasoning_end="</think>"),
]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("structured_output", {}),
        ("structured_output", {"choice": []}),
        ("structured_output", {"json_schema": None, "json_object": False}),
        ("structured_output", {"regex": "a", "grammar": "b"}),
        ("structured_output", {"json_object": True, "choice": ["a"]}),
        ("structured_output.json_schema", {"json_schema": 5}),
        ("structured_output.json_schema", {"json_schema": {"const": float("nan")}}),
        ("structured_output.json_schema", {"json_schema": {"const": object()}}),
        ("structured_output.json_schema", {"json_schema": {"const": "\ud83d"}}),
        ("structured_output.json_schema", {"json_schema": ""}),
        ("structured_output.json_schema", {"json_schema": " " * (MAX_CONSTRAINT_BYTES + 1)}),
        ("structured_output.json_object", {"json_object": 1}),
        ("structured_output.regex", {"regex": b"a"}),
        ("structured_output.regex", {"regex": "é" * (MAX_CONSTRAINT_BYTES // 2 + 1)}),
        ("structured_output.choice", {"choice": "abc"}),
        ("structured_output.choice", {"choice": ["a", 1]}),
        ("structured_output.choice", {"choice": ["a", ""]}),
        ("structured_output.choice", {"choice": ["a"] * (MAX_CHOICES + 1)}),
        ("structured_output.choice", {"choice": ["a" * MAX_CONSTRAINT_BYTES, "b"]}),
        ("structured_output.grammar", {"grammar": ["a"]}),
        ("structured_output.grammar", {"grammar": "\ud83d"}),
        ("structured_output.lenient", {"json_object": True, "lenient": True}),
        ("structured_output.lenient", {"json_schema": "{}", "lenient": None}),
        ("structured_output.reasoning_end", {"json_schema": "{}", "reasoning_end": " "}),
        ("structured_output.reasoning_end", {"json_schema": "{}", "reasoning_end": "x" * 101}),
        ("structured_output.reasoning_start", {"json_schema": "{}", "reasoning_start": "<"}),
        ("structured_output.fit_max_tokens", {"json_schema": "{}", "fit_max_tokens": 1}),
    ],
)
def test_a_bad_constraint_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        StructuredOutput(**values)
    assert caught.value.field == field


def test_a_schema_may_be_a_mapping_or_a_pydantic_model() -> None:
    class Point(BaseModel):
        y: int
        x: int

    schema = {"properties": {"b": {}, "a": {"const": "é"}}}
    text = StructuredOutput(json_schema=schema).json_schema  # type: ignore[arg-type]
    assert text is not None
    assert json.loads(text) == schema
    assert text.index('"b"') < text.index('"a"')
    text = StructuredOutput(json_schema=Point).json_schema  # type: ignore[arg-type]
    assert text is not None
    assert list(json.loads(text)["properties"]) == ["y", "x"]


@pytest.mark.parametrize("constraint", OF_EACH_KIND, ids=lambda each: each.kind)
def test_a_constraint_crosses_the_wire_whole(constraint: StructuredOutput) -> None:
    params = SamplingParams(structured_output=constraint, max_tokens=5)
    message = sampling_pb2.SamplingParams.FromString(
        sampling_params_to_proto(params).SerializeToString()
    )
    assert sampling_params_from_proto(message) == params


@pytest.mark.parametrize("fits", [True, False])
def test_whether_an_output_fits_crosses_the_wires(fits: bool) -> None:
    constraint = StructuredOutput(json_object=True, fit_max_tokens=fits)
    params = SamplingParams(structured_output=constraint)
    read = sampling_params_from_proto(sampling_params_to_proto(params)).structured_output
    plan = StepPlan(1, new_sequences=[NewSequence(1, 0, 7, [1], [], params)])
    sent = decode_plan(encode(plan)).new_sequences[0].sampling_params.structured_output
    assert read is not None
    assert sent is not None
    assert read.fit_max_tokens is sent.fit_max_tokens is fits
    unset = sampling_pb2.StructuredOutput(json_object=sampling_pb2.JsonObject())
    assert structured_output_from_proto(unset).fit_max_tokens


@pytest.mark.parametrize("constraint", OF_EACH_KIND, ids=lambda each: each.kind)
def test_a_constraint_reaches_a_worker_in_another_process(constraint: StructuredOutput) -> None:
    new = NewSequence(1, 0, 7, [1], [], SamplingParams(structured_output=constraint))
    plan = StepPlan(1, new_sequences=[new])
    assert decode_plan(encode(plan)) == plan


def test_a_message_without_a_constraint_is_refused_by_name() -> None:
    empty = sampling_pb2.StructuredOutput()
    choice = sampling_pb2.StructuredOutput(choice=sampling_pb2.Choice())
    many = sampling_pb2.StructuredOutput(choice=sampling_pb2.Choice(texts=["a"] * 5000))
    for message, field in ((empty, ""), (choice, ".choice"), (many, ".choice")):
        with pytest.raises(InvalidArgumentError) as caught:
            structured_output_from_proto(message)
        assert caught.value.field == f"structured_output{field}"


def test_parameters_take_a_constraint_only_as_such_and_not_with_a_beam_search() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]
    assert caught.value.field == "structured_output"
    from pagewire import BeamSearchParams

    with pytest.raises(InvalidArgumentError) as caught:
        BeamSearchParams(beam_width=2).as_sampling_params(structured_output=OF_EACH_KIND[0])
    assert caught.value.field == "structured_output"
