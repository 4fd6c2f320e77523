"""`pagewire bench`: the workload, what the measurements come to, and mistakes in the flags."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import InvalidArgumentError, UnavailableError
from pagewire.outputs import RequestTimes
from pagewire_frontend.bench.measurement import (
    PhaseThroughput,
    RequestMeasurement,
    covered_s,
    summarize,
)
from pagewire_frontend.bench.report import as_json, as_table
from pagewire_frontend.bench.runner import run_workload
from pagewire_frontend.bench.settings import BenchSettings
from pagewire_frontend.bench.targets import OfflineTarget
from pagewire_frontend.bench.workload import BenchRequest, make_workload
from pagewire_frontend.cli import main as pagewire
from pagewire_frontend.engine_client.base import EngineRequest
from pagewire_frontend.generation import Generation, GenerationSettings
from tests.fakes.fake_engine_client import FakeEngineClient, FakeStream

POOL = range(100, 200)


def measured(
    sent_at: float, arrivals: Sequence[tuple[float, int]], **times: float
) -> RequestMeasurement:
    return RequestMeasurement(
        10,
        sent_at,
        list(arrivals),
        arrivals[-1][0] + 0.5,
        RequestTimes(**times),  # type: ignore[arg-type]  # counts too
    )


def test_the_same_seed_makes_the_same_workload_and_another_a_different_one() -> None:
    def workload(seed: int) -> list[BenchRequest]:
        return make_workload(
            BenchSettings(prompt_len="5-50", output_len="1-9", request_rate=3.0, seed=seed), POOL
        )

    assert workload(1) == workload(1)
    assert workload(1) != workload(2)


def test_lengths_prefix_and_arrivals_are_as_asked_for() -> None:
    settings = BenchSettings(
        num_prompts=400,
        warmup=2,
        prompt_len="5-9",
        output_len="3",
        shared_prefix_len=4,
        request_rate=10.0,
    )
    requests = make_workload(settings, POOL)
    assert len(requests) == 402
    assert {len(request.token_ids) - 4 for request in requests} == {5, 6, 7, 8, 9}
    assert len({tuple(request.token_ids[:4]) for request in requests}) == 1
    assert {request.output_len for request in requests} == {3}
    assert set(requests[9].token_ids) <= set(POOL)
    # The first that is measured is sent at once; 399 more in about 40 s.
    assert requests[2].arrival_s == 0.0
    assert requests[-1].arrival_s == pytest.approx(39.9, rel=0.2)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=12))
def test_covered_time_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    pairs = [(low, low + length) for low, length in intervals]
    moments = {moment for low, high in pairs for moment in range(low, high)}
    assert covered_s(pairs) == len(moments)


def test_a_summary_splits_throughput_into_prefill_and_decode() -> None:
    one = measured(0.0, [(2.0, 1), (3.0, 2), (5.0, 2)], queue_s=0.5, prefill_s=1.5, decode_s=3.0)
    two = measured(1.0, [(3.0, 1), (4.0, 1)], prefill_s=1.0, decode_s=1.0, cached_tokens=4)
    summary = summarize([one, two], num_failed=1)
    assert (summary.num_requests, summary.num_failed) == (2, 1)
    assert summary.duration_s == 5.5
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (20, 7, 4)
    # Prefill from 0.5 to 2 and from 2 to 3, decode from 2 to 5 and within it.
    assert (summary.prefill.tokens, summary.prefill.seconds) == (16, 2.5)
    assert (summary.decode.tokens, summary.decode.seconds) == (5, 3.0)
    assert summary.decode.tokens_per_s == pytest.approx(5 / 3)
    latencies = summary.latencies
    assert latencies["ttft"].mean == 2.0
    assert latencies["ttft"].percentiles == {50: 2.0, 90: 2.0, 99: 2.0}
    assert latencies["tpot"].mean == pytest.approx((3 / 4 + 1) / 2)
    assert latencies["itl"].mean == pytest.approx((0.5 + 0.5 + 1 + 1 + 1) / 5)
    assert latencies["e2e"].percentiles == {50: 3.5, 90: 5.5, 99: 5.5}


def test_phases_are_the_engines_however_tokens_arrive() -> None:
    apart = measured(0.0, [(2.0, 1), (3.0, 1), (5.0, 3)], prefill_s=1.5, decode_s=3.0)
    together = measured(0.0, [(5.0, 5)], prefill_s=1.5, decode_s=3.0)
    told, same = summarize([apart], 0), summarize([together], 0)
    assert told.prefill == same.prefill == PhaseThroughput(10, 1.5)
    assert told.decode == same.decode == PhaseThroughput(4, 3.0)


def test_answers_of_one_token_have_no_time_per_output_token() -> None:
    summary = summarize([measured(0.0, [(1.0, 1)])], 0)
    assert {"tpot", "itl"}.isdisjoint(summary.latencies)
    assert "time per output token" not in as_table(summary, "m", BenchSettings())


async def run(client: FakeEngineClient, **settings: Any) -> Any:
    generation = await Generation.create(client, GenerationSettings())
    chosen = BenchSettings(**settings)
    return await run_workload(OfflineTarget(generation), chosen), chosen


async def test_no_more_are_in_flight_than_allowed_and_none_of_the_warm_up_counts() -> None:
    most = 0

    def reply(request: object, index: int) -> str:
        nonlocal most
        most = max(most, len(client.live))
        return "x" * 20

    client = FakeEngineClient(reply=reply, delay_s=0.001)
    summary, settings = await run(
        client, num_prompts=9, warmup=2, max_concurrency=3, prompt_len="7", output_len="5"
    )
    assert most == 3
    assert len(client.requests) == 11
    assert (summary.num_requests, summary.prompt_tokens, summary.output_tokens) == (9, 63, 45)
    told = as_json(summary, "m", settings)
    assert told["workload"]["max_concurrency"] == 3
    assert told["latency_s"]["queue"]["p50"] == 0.25
    assert told["output_tokens_per_s"] == pytest.approx(45 / told["duration_s"])
    assert json.loads(json.dumps(told)) == told
    params = client.requests[0].sampling_params
    assert (params.temperature, params.min_tokens, params.ignore_eos) == (0.0, 5, True)


async def test_at_a_rate_a_wait_for_a_slot_counts() -> None:
    client = FakeEngineClient(delay_s=0.01)
    summary, _ = await run(
        client, num_prompts=4, warmup=0, max_concurrency=1, request_rate=1e6, output_len="5"
    )
    # All are due at once: the last has waited for all the others.
    assert 4 * 5 * 0.01 - 0.001 <= summary.latencies["e2e"].percentiles[99] <= summary.duration_s


async def test_a_rate_alone_limits_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    client, all_there = FakeEngineClient(), asyncio.Event()
    submit = client.submit

    async def submit_with_all_others(request: EngineRequest) -> FakeStream:
        stream = await submit(request)
        if len(client.live) == 40:
            all_there.set()
        await asyncio.wait_for(all_there.wait(), 30)
        return stream

    monkeypatch.setattr(client, "submit", submit_with_all_others)
    summary, settings = await run(
        client, num_prompts=40, warmup=0, request_rate=1e6, output_len="3"
    )
    assert as_json(summary, "m", settings)["workload"]["max_concurrency"] is None
    assert "no limit in flight" in as_table(summary, "m", settings)
    assert as_json(summary, "m", BenchSettings())["workload"]["max_concurrency"] == 32


async def test_a_table_names_what_it_shows() -> None:
    summary, settings = await run(FakeEngineClient(), num_prompts=2, output_len="5")
    table = as_table(summary, "some-model", settings)
    assert "some-model (in this process): 2 requests" in table
    for row in ("prefill", "decode", "time to first token", "time per output token", "end to end"):
        assert f"\n{row} " in table


async def test_when_all_fail_their_error_is_the_result() -> None:
    with pytest.raises(UnavailableError):
        await run(FakeEngineClient(fail_after=1), num_prompts=3, warmup=0)


async def test_a_workload_longer_than_the_context_is_refused_before_it_runs() -> None:
    client = FakeEngineClient(max_model_len=100)
    with pytest.raises(InvalidArgumentError, match="--shared-prefix-len"):
        await run(client, prompt_len="50", output_len="20", shared_prefix_len=31)
    assert not client.requests


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-len=0"], "--prompt-len: must be a number of tokens, or MIN-MAX"),
        (["--output-len=9-3"], "--output-len: must be a number of tokens, or MIN-MAX"),
        (["--target=nowhere"], "--target: must be HOST:PORT"),
        (["--request-rate=0"], "--request-rate: "),
        (["--target=localhost:1", "--dtype=float32"], "--dtype is about a model that is loaded"),
        (["--target=localhost:1", "some-model"], "--model is about a model that is loaded here"),
        (["--http-port=1"], "there is no flag --http-port"),
        (["--target-ca=ca.pem"], "--target-ca is about a running server: name it by --target"),
        (["--target=localhost:1", "--target-ca=/no/ca"], "--target-ca: can't read /no/ca"),
        (["--target=localhost:1", "--target-cert=c", "--target-key=k"], "TLS needs --target-ca"),
        (["--target=localhost:1", "--api-key=two words"], "--api-key: must be one API key"),
        (["--model=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        pagewire(["bench", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], free_port: Callable[[], int]
) -> None:
    port = free_port()
    with pytest.raises(SystemExit) as stopped:
        pagewire(["bench", f"--target=127.0.0.1:{port}"])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert f"--target: no pagewire frontend answers at 127.0.0.1:{port}" in error
