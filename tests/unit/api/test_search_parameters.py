"""best_of and beam search: what is refused and by which name, and how it crosses the wires."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire import BeamSearchParams, SamplingParams
from pagewire.conversion import (
    beam_search_from_proto,
    beam_search_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
)
from pagewire.errors import InvalidArgumentError
from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_frontend.grpc_api.requests import sampling_params
from pagewire_frontend.openai_api.requests import ChatBody, CompletionBody

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": 129}),
        ("beam_width", {"beam_width": 2.0}),
        ("beam_width", {"beam_width": None}),
        ("n", {"beam_width": 2, "n": 3}),
        ("n", {"beam_width": 2, "n": 0}),
        ("max_tokens", {"beam_width": 2, "max_tokens": 0}),
        ("ignore_eos", {"beam_width": 2, "ignore_eos": 1}),
        ("temperature", {"beam_width": 2, "temperature": -1.0}),
        ("length_penalty", {"beam_width": 2, "length_penalty": float("nan")}),
        ("length_penalty", {"beam_width": 2, "length_penalty": 11}),
        ("length_penalty", {"beam_width": 2, "length_penalty": "1"}),
        ("early_stopping", {"beam_width": 2, "early_stopping": "always"}),
        ("early_stopping", {"beam_width": 2, "early_stopping": 1}),
        ("logprobs", {"beam_width": 2, "logprobs": 21}),
    ],
)
def test_a_bad_beam_search_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        BeamSearchParams(**values)
    assert caught.value.field == field


@pytest.mark.parametrize("values", [{"best_of": 0}, {"best_of": 129}, {"n": 3, "best_of": 2}])
def test_a_bad_best_of_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**values)
    assert caught.value.field == "best_of"


def test_all_beams_are_told_unless_fewer_are_asked_for() -> None:
    assert BeamSearchParams(beam_width=4).as_sampling_params().n == 4
    assert BeamSearchParams(beam_width=4, n=2).as_sampling_params().n == 2


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_beam_search_crosses_the_wire_whole(early_stopping: Any) -> None:
    params = BeamSearchParams(
        beam_width=5,
        n=3,
        max_tokens=40,
        ignore_eos=True,
        temperature=1.5,
        length_penalty=-0.5,
        early_stopping=early_stopping,
        logprobs=4,
    ).as_sampling_params()
    message = sampling_pb2.BeamSearchParams.FromString(
        beam_search_to_proto(params).SerializeToString()
    )
    assert beam_search_from_proto(message) == params
    least = BeamSearchParams(beam_width=2).as_sampling_params()
    assert beam_search_from_proto(beam_search_to_proto(least)) == least
    assert beam_search_from_proto(sampling_pb2.BeamSearchParams(beam_width=2)) == least


def test_best_of_crosses_the_wire() -> None:
    params = SamplingParams(n=2, best_of=5)
    assert sampling_params_from_proto(sampling_params_to_proto(params)) == params


def test_grpc_takes_one_of_sampling_and_beam_search() -> None:
    request = inference_pb2.GenerateRequest(text="x")
    request.beam_search.beam_width = 3
    request.text_params.skip_special_tokens = False
    params = sampling_params(request, DEFAULTS)
    assert params.beam_search is not None
    assert (params.n, params.temperature, params.top_p) == (3, 0.0, 1.0)
    assert not params.skip_special_tokens
    request.text_params.stop.append("x")
    with pytest.raises(InvalidArgumentError) as caught:
        sampling_params(request, DEFAULTS)
    assert caught.value.field == "stop"
    request.ClearField("text_params")
    request.sampling_params.n = 2
    params = sampling_params(request, DEFAULTS)
    assert (params.beam_search, params.n, params.temperature) == (None, 2, 0.7)


def test_openai_names_the_width_best_of_or_else_n() -> None:
    def asked(**fields: Any) -> tuple[int, int]:
        body = ChatBody(messages=MESSAGES, use_beam_search=True, **fields)
        params = body.chat_sampling_params(DEFAULTS)
        assert params.beam_search is not None
        return params.n, params.beam_search.beam_width

    assert asked() == (1, 1)
    assert asked(n=3) == (3, 3)
    assert asked(best_of=4) == (1, 4)
    assert asked(n=2, best_of=4) == (2, 4)


def test_openai_fields_of_a_beam_search() -> None:
    body = CompletionBody(
        prompt="x",
        use_beam_search=True,
        n=2,
        length_penalty=0.5,
        early_stopping="never",
        temperature=0,
        top_p=1,
        seed=3,
        max_tokens=7,
        logprobs=1,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    params = body.completion_sampling_params(DEFAULTS)
    beams = params.beam_search
    assert beams is not None
    assert (beams.length_penalty, beams.early_stopping) == (0.5, "never")
    assert (params.max_tokens, params.logprobs, params.ignore_eos) == (7, 1, True)
    assert (params.temperature, params.top_p, params.skip_special_tokens) == (0, 1, False)
    # The model's own defaults are about sampling.
    assert params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 100.0}, "length_penalty"),
    ],
)
def test_openai_refuses_what_a_beam_search_can_not_serve(
    fields: dict[str, Any], param: str
) -> None:
    body = CompletionBody(prompt="x", use_beam_search=True, **fields)
    with pytest.raises(InvalidArgumentError) as caught:
        body.completion_sampling_params(DEFAULTS)
    assert caught.value.field == param


@pytest.mark.parametrize("fields", [{"length_penalty": 0.5}, {"early_stopping": True}])
def test_openai_refuses_fields_of_a_beam_search_without_one(fields: dict[str, Any]) -> None:
    body = CompletionBody(prompt="x", **fields)
    with pytest.raises(InvalidArgumentError) as caught:
        body.completion_sampling_params(DEFAULTS)
    assert caught.value.field in fields
    CompletionBody(prompt="x", length_penalty=1.0, early_stopping=False).completion_sampling_params(
        DEFAULTS
    )


def test_openai_streams_no_best_of() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        _ = CompletionBody(prompt="x", best_of=2, stream=True).streams
    assert caught.value.field == "best_of"
    assert CompletionBody(prompt="x", n=2, best_of=2, stream=True).streams
    assert CompletionBody(prompt="x", best_of=2, use_beam_search=True, stream=True).streams
    assert not CompletionBody(prompt="x", best_of=2).streams
