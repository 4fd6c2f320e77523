"""Requests, tokens and times are counted once each, however a request ends."""

from __future__ import annotations

import pytest

from pagewire.errors import PagewireError, UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient
from tests.fakes.frontend import make_serving


def value(serving: Serving, name: str, **labels: str) -> float:
    sample = serving.metrics.registry.get_sample_value(name, labels)
    assert sample is not None, name
    return sample


def request(**params: object) -> GenerationRequest:
    sampling_params = SamplingParams(max_tokens=64, **params)  # type: ignore[arg-type]  # any
    return GenerationRequest(prompt="abc", sampling_params=sampling_params)


async def test_a_finished_request_counts_its_tokens_and_times() -> None:
    serving = await make_serving(FakeEngineClient(delay_s=0.002))
    async with serving.run(request(n=2)) as generation:
        assert value(serving, "pagewire_num_requests_running") == 1
        await generation.collect()
    assert value(serving, "pagewire_num_requests_running") == 0
    assert value(serving, "pagewire_request_success_total", finished_reason="stop") == 2
    assert value(serving, "pagewire_prompt_tokens_total") == 3
    assert value(serving, "pagewire_generation_tokens_total") == 28
    for name in (
        "pagewire_time_to_first_token_seconds",
        "pagewire_request_time_per_output_token_seconds",
        "pagewire_e2e_request_latency_seconds",
        "pagewire_request_queue_time_seconds",
    ):
        assert value(serving, f"{name}_count") == 1
    first = value(serving, "pagewire_time_to_first_token_seconds_sum")
    total = value(serving, "pagewire_e2e_request_latency_seconds_sum")
    per_token = value(serving, "pagewire_request_time_per_output_token_seconds_sum")
    assert 0 < first < total
    assert per_token == pytest.approx((total - first) / 13)


async def test_an_aborted_request_counts_what_it_produced_and_no_times() -> None:
    serving = await make_serving(FakeEngineClient(delay_s=0.001))
    async with serving.run(request()) as generation:
        for _ in range(3):
            await anext(generation)
    assert value(serving, "pagewire_request_failure_total", code="CANCELLED") == 1
    assert value(serving, "pagewire_generation_tokens_total") == 3
    assert value(serving, "pagewire_e2e_request_latency_seconds_count") == 0
    assert value(serving, "pagewire_num_requests_running") == 0


async def test_refused_and_failed_requests_count_by_code() -> None:
    serving = await make_serving(FakeEngineClient(fail_after=1))
    with pytest.raises(PagewireError):
        await serving.start(GenerationRequest(prompt=""))
    with pytest.raises(UnavailableError):
        async with serving.run(request()) as generation:
            await generation.collect()
    assert value(serving, "pagewire_request_failure_total", code="INVALID_ARGUMENT") == 1
    assert value(serving, "pagewire_request_failure_total", code="UNAVAILABLE") == 1
    assert value(serving, "pagewire_num_requests_running") == 0


async def test_two_frontends_in_one_process_count_apart() -> None:
    first, second = [await make_serving(FakeEngineClient()) for _ in range(2)]
    async with first.run(request()) as generation:
        await generation.collect()
    assert value(first, "pagewire_prompt_tokens_total") == 3
    assert value(second, "pagewire_prompt_tokens_total") == 0
    assert b"pagewire_prompt_tokens_total 3.0" in first.metrics.render()
