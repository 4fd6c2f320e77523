"""Requests, tokens and times are counted once each, however a request ends."""

from __future__ import annotations

import asyncio

import pytest

from pagewire.errors import PagewireError, UnavailableError
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import engine_pb2
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import MODEL, FakeEngineClient
from tests.fakes.frontend import make_serving


def value(serving: Serving, name: str, **labels: str) -> float:
    sample = serving.metrics.registry.get_sample_value(name, labels)
    assert sample is not None, name
    return sample


def request(**params: object) -> GenerationRequest:
    sampling_params = SamplingParams(max_tokens=64, **params)  # type: ignore[arg-type]  # any
    return GenerationRequest(prompt="abc", sampling_params=sampling_params)


async def test_a_finished_request_counts_its_tokens_and_times() -> None:
    serving = await make_serving(FakeEngineClient(delay_s=0.002, cached_tokens=2))
    async with serving.run(request(n=2)) as generation:
        assert value(serving, "pagewire_num_requests_in_flight") == 1
        await generation.collect()
    assert value(serving, "pagewire_num_requests_in_flight") == 0
    assert value(serving, "pagewire_request_success_total", finished_reason="stop") == 2
    assert value(serving, "pagewire_prompt_tokens_total") == 3
    assert value(serving, "pagewire_prompt_tokens_cached_total") == 2
    assert value(serving, "pagewire_generation_tokens_total") == 28
    for name in (
        "pagewire_time_to_first_token_seconds",
        "pagewire_request_time_per_output_token_seconds",
        "pagewire_e2e_request_latency_seconds",
        "pagewire_request_queue_time_seconds",
        "pagewire_request_prefill_time_seconds",
        "pagewire_request_decode_time_seconds",
        "pagewire_request_inference_time_seconds",
        "pagewire_request_prompt_tokens",
    ):
        assert value(serving, f"{name}_count") == 1
    assert value(serving, "pagewire_request_prompt_tokens_sum") == 3
    assert value(serving, "pagewire_request_generation_tokens_count") == 2
    assert value(serving, "pagewire_request_generation_tokens_sum") == 28
    assert value(serving, "pagewire_request_queue_time_seconds_sum") == 0.25
    assert value(serving, "pagewire_request_prefill_time_seconds_sum") == 0.5
    decode = value(serving, "pagewire_request_decode_time_seconds_sum")
    assert value(serving, "pagewire_request_inference_time_seconds_sum") == 0.5 + decode
    assert decode > 13 * 0.002
    # Each token after a sequence's first waited for the one before.
    assert value(serving, "pagewire_inter_token_latency_seconds_count") == 2 * 13
    waited = value(serving, "pagewire_inter_token_latency_seconds_sum")
    first = value(serving, "pagewire_time_to_first_token_seconds_sum")
    total = value(serving, "pagewire_e2e_request_latency_seconds_sum")
    assert 2 * 13 * 0.002 <= waited <= 2 * (total - first)
    per_token = value(serving, "pagewire_request_time_per_output_token_seconds_sum")
    assert 0 < first < total
    assert per_token == pytest.approx((total - first) / 13)


async def test_an_aborted_request_counts_what_it_produced_and_no_times() -> None:
    serving = await make_serving(FakeEngineClient(delay_s=0.001))
    async with serving.run(request()) as generation:
        for _ in range(3):
            await anext(generation)
    assert value(serving, "pagewire_request_failure_total", code="CANCELLED") == 1
    assert value(serving, "pagewire_request_success_total", finished_reason="abort") == 1
    assert value(serving, "pagewire_generation_tokens_total") == 3
    assert value(serving, "pagewire_e2e_request_latency_seconds_count") == 0
    assert value(serving, "pagewire_num_requests_in_flight") == 0


async def test_refused_and_failed_requests_count_by_code() -> None:
    serving = await make_serving(FakeEngineClient(fail_after=1))
    with pytest.raises(PagewireError):
        await serving.start(GenerationRequest(prompt=""))
    with pytest.raises(UnavailableError):
        async with serving.run(request()) as generation:
            await generation.collect()
    assert value(serving, "pagewire_request_failure_total", code="INVALID_ARGUMENT") == 1
    assert value(serving, "pagewire_request_failure_total", code="UNAVAILABLE") == 1
    assert value(serving, "pagewire_num_requests_in_flight") == 0


async def test_two_frontends_in_one_process_count_apart() -> None:
    first, second = [await make_serving(FakeEngineClient()) for _ in range(2)]
    async with first.run(request()) as generation:
        await generation.collect()
    assert value(first, "pagewire_prompt_tokens_total") == 3
    assert value(second, "pagewire_prompt_tokens_total") == 0
    assert b'pagewire_prompt_tokens_total{model_name="m"} 3.0' in first.metrics.render("m")


async def test_tokens_that_come_together_share_the_time_they_took() -> None:
    serving = await make_serving(FakeEngineClient(delay_s=0.001, tokens_a_step=5))
    async with serving.run(request()) as generation:
        await generation.collect()
    assert value(serving, "pagewire_generation_tokens_total") == 14
    assert value(serving, "pagewire_inter_token_latency_seconds_count") == 9


async def test_a_scrape_tells_what_the_engine_counts() -> None:
    client = FakeEngineClient(hang_after=1)
    serving = await make_serving(client)
    async with serving.run(request()) as generation:
        await anext(generation)
        text = (await serving.scrape()).decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")

    def figure(name: str, **labels: str) -> float:
        pairs = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": MODEL, **labels}.items()))
        return float(figures[f"pagewire_{name}{{{pairs}}}"])

    assert figure("num_requests_running") == 1
    assert figure("num_requests_waiting") == 2
    assert figure("num_requests_swapped") == 5
    assert figure("kv_cache_usage_perc") == (64 - 40 - 8) / 64
    assert figure("cpu_cache_usage_perc") == 4 / 16
    assert [figure("kv_blocks", state=s) for s in ("free", "held", "cached")] == [40, 16, 8]
    assert figure("prefix_cache_queries_total") == 100
    assert figure("prefix_cache_hits_total") == 25
    assert figure("num_preemptions_total") == 3
    assert figure("num_swaps_total") == 2
    bounds = ("1.0", "8.0", "+Inf")
    assert [figure("iteration_tokens_total_bucket", le=le) for le in bounds] == [4, 6, 7]
    assert figure("iteration_tokens_total_sum") == 30
    assert figure("engine_ready") == 1


async def test_while_the_engine_is_away_its_figures_are_absent() -> None:
    client = FakeEngineClient()
    serving = await make_serving(client)
    assert b"pagewire_num_requests_running{" in await serving.scrape()
    client.is_ready = False
    await asyncio.sleep(0.25)
    text = await serving.scrape()
    assert b"pagewire_num_requests_running{" not in text
    assert b"pagewire_engine_ready{" in text


async def test_scrapers_that_come_together_all_get_the_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeEngineClient()
    serving = await make_serving(client)
    asked, answer = 0, asyncio.Event()
    stats = client.stats

    async def slowly(timeout_s: float) -> engine_pb2.GetStatsResponse:
        nonlocal asked
        asked += 1
        await answer.wait()
        return await stats(timeout_s)

    monkeypatch.setattr(client, "stats", slowly)
    first, *others = [asyncio.create_task(serving.scrape()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in others)
    # One that goes away does not take the answer from the others.
    first.cancel()
    await asyncio.sleep(0.01)
    answer.set()
    for text in await asyncio.gather(*others):
        assert b"pagewire_num_requests_running{" in text
    assert asked == 1


async def test_a_frontend_without_an_engine_is_scraped_all_the_same() -> None:
    serving = Serving(FrontendConfig())
    assert b'pagewire_engine_ready{model_name=""} 0.0' in await serving.scrape()
