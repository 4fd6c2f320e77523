"""What a client hears of the engine, and the engine of a client: cached prefixes in usage, groups
of sequences, connections that close, and the names of `/metrics`; with a real model."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from pagewire.config import EngineConfig
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.serve_process import MODEL, Served
from tests.e2e.wire_peer import wait_until

BLOCK_SIZE = EngineConfig.model_fields["block_size"].default
# Some hundred tokens that no other test asks about.
TALE = "A miller had three sons, and when he died the eldest got the mill. " * 8
# Names of vLLM's metrics, but for their prefix.
METRICS = {
    "counter": (
        "prompt_tokens generation_tokens request_success num_preemptions prefix_cache_queries "
        "prefix_cache_hits"
    ),
    "gauge": "num_requests_running num_requests_waiting num_requests_swapped kv_cache_usage_perc",
    "histogram": (
        "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
        "request_time_per_output_token_seconds request_queue_time_seconds "
        "request_prefill_time_seconds request_decode_time_seconds "
        "request_inference_time_seconds request_prompt_tokens request_generation_tokens "
        "iteration_tokens_total"
    ),
}


@pytest.fixture
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def scrape(served: Served) -> str:
    """All figures. The engine's are missing while it is too busy to tell them."""
    pages: list[str] = []

    def has_the_engines() -> bool:
        with urllib.request.urlopen(served.http + "/metrics", timeout=20) as page:
            pages.append(page.read().decode())
        return "pagewire_num_requests_running{" in pages[-1]

    wait_until(has_the_engines, "the engine tells its figures")
    return pages[-1]


def figure(served: Served, name: str, **labels: str) -> float:
    pairs = ",".join(f'{k}="{v}"' for k, v in sorted({"model_name": MODEL, **labels}.items()))
    line = re.compile(rf"^pagewire_{name}{{{re.escape(pairs)}}} (\S+)$", re.M)
    (value,) = line.findall(scrape(served))
    return float(value)


def complete(served: Served, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    with served.post("/v1/completions", body) as answer:
        return dict(json.load(answer))


def generate(prompt: str, **params: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=prompt)
    for name, value in {"max_tokens": 2, "temperature": 0.0, **params}.items():
        setattr(request.sampling_params, name, value)
    return request


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def full_blocks(num_prompt_tokens: int) -> int:
    """Tokens of a prompt that was computed before which are not computed again: the last one
    always is."""
    return (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_usage_tells_the_cached_tokens_over_http(served: Served) -> None:
    first = complete(served, "Over HTTP. " + TALE)["usage"]
    assert cached(first) == 0
    assert first["prompt_tokens"] > 4 * BLOCK_SIZE
    again = complete(served, "Over HTTP. " + TALE)["usage"]
    assert cached(again) == full_blocks(again["prompt_tokens"])
    # Half of the text, and then another end.
    half = "Over HTTP. " + TALE[: len(TALE) // 2]
    other = complete(served, half + "The second son got the donkey.")["usage"]
    assert 0 < cached(other) < other["prompt_tokens"] - BLOCK_SIZE / 2
    assert cached(other) % BLOCK_SIZE == 0
    # A chat: its second turn finds the first, and what was answered.
    messages = [{"role": "user", "content": "In a chat. " + TALE}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    with served.post("/v1/chat/completions", body) as answer:
        turn = json.load(answer)
    messages += [turn["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with served.post("/v1/chat/completions", {**body, **options}) as stream:
        events = [json.loads(line[6:]) for line in stream if line.startswith(b"data: {")]
    assert cached(events[-1]["usage"]) >= full_blocks(turn["usage"]["prompt_tokens"])


def test_usage_tells_the_cached_tokens_over_grpc(served: Served, stub: Any) -> None:
    hits = figure(served, "prefix_cache_hits_total")
    first = stub.GenerateUnary(generate("Over gRPC. " + TALE), timeout=60).usage
    assert first.cached_tokens == 0
    again = stub.GenerateUnary(generate("Over gRPC. " + TALE), timeout=60).usage
    assert again.cached_tokens == full_blocks(again.prompt_tokens) > 4 * BLOCK_SIZE
    *_, last = stub.Generate(generate("Over gRPC. " + TALE), timeout=60)
    assert last.usage.cached_tokens == again.cached_tokens
    assert figure(served, "prefix_cache_hits_total") == hits + 2 * again.cached_tokens


def test_prompt_logprobs_are_a_full_list_though_the_prefix_is_cached(
    served: Served, stub: Any
) -> None:
    """vllm#3251."""
    prompt = "Told in full. " + TALE
    stub.GenerateUnary(generate(prompt), timeout=60)
    told = stub.GenerateUnary(generate(prompt, prompt_logprobs=1), timeout=60)
    assert len(told.prompt_logprobs) == told.usage.prompt_tokens - 1
    assert all(len(position.top) == 1 for position in told.prompt_logprobs)
    # Who does not ask for them finds the prefix, as before.
    plain = stub.GenerateUnary(generate(prompt), timeout=60)
    assert plain.usage.cached_tokens == full_blocks(plain.usage.prompt_tokens)
    echoed = complete(served, prompt, echo=True, logprobs=1, max_tokens=1)
    logprobs = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == echoed["usage"]["prompt_tokens"] + 1
    assert logprobs[0] is None
    known = [position.token.logprob for position in told.prompt_logprobs]
    assert logprobs[1:-1] == pytest.approx(known, abs=1e-3)
    http = complete(served, prompt, prompt_logprobs=1, return_token_ids=True, max_tokens=1)
    (choice,) = http["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    assert len(entries) == len(choice["prompt_token_ids"]) - 1
    own = zip(entries, choice["prompt_token_ids"][1:], strict=True)
    same = [entry[str(token_id)]["logprob"] for entry, token_id in own]
    assert same == pytest.approx(known, abs=1e-3)


def test_a_prompt_that_is_scored_alone_has_the_scores_of_one_that_goes_on(
    served: Served, stub: Any
) -> None:
    prompt = "Scored alone. " + TALE
    (going_on,) = complete(served, prompt, echo=True, logprobs=1, max_tokens=1)["choices"]
    alone = complete(served, prompt, echo=True, logprobs=1, max_tokens=0)
    (choice,) = alone["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert len(scores) == alone["usage"]["prompt_tokens"] == alone["usage"]["total_tokens"]
    assert scores[1:] == pytest.approx(going_on["logprobs"]["token_logprobs"][1:-1], abs=1e-3)
    told = stub.GenerateUnary(generate(prompt, prompt_logprobs=1, max_tokens=0), timeout=60)
    assert [p.token.logprob for p in told.prompt_logprobs] == pytest.approx(scores[1:], abs=1e-3)
    assert told.usage.completion_tokens == 0


def test_n_over_grpc_is_n_over_http(served: Served, stub: Any) -> None:
    asked: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 8}
    prompt = "The three primary colours are"
    texts = [choice["text"] for choice in complete(served, prompt, **asked)["choices"]]
    assert len(set(texts)) == 3
    unary = stub.GenerateUnary(generate(prompt, **asked), timeout=60)
    assert [output.index for output in unary.outputs] == [0, 1, 2]
    assert [output.text for output in unary.outputs] == texts
    assert unary.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for part in stub.Generate(generate(prompt, **asked), timeout=60):
        for output in part.outputs:
            streamed[output.index] += output.text
    assert streamed == texts


def test_a_closed_http_connection_stops_both_sequences_and_returns_every_block(
    served: Served,
) -> None:
    """vllm PR#14326."""
    aborted = _aborted(served)
    address = urlsplit(served.http)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    body = {"model": MODEL, "prompt": "Once", "n": 2, "stream": True}
    body |= {"max_tokens": 1000, "ignore_eos": True, "temperature": 1.0}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    begun: set[int] = set()
    while len(begun) < 2:
        line = response.readline()
        if line.startswith(b"data: {"):
            begun |= {choice["index"] for choice in json.loads(line[6:])["choices"]}
    wait_until(lambda: figure(served, "kv_blocks", state="held") > 0, "blocks are held")
    response.close()
    connection.close()
    _is_at_rest(served)
    wait_until(lambda: _aborted(served) == aborted + 2, "both sequences were aborted")


def test_a_closed_grpc_connection_stops_both_sequences_and_returns_every_block(
    served: Served,
) -> None:
    """vllm PR#14326."""
    aborted = _aborted(served)
    request = generate("Once", n=2, max_tokens=1000, ignore_eos=True, temperature=1.0)
    with grpc.insecure_channel(served.grpc) as channel:
        begun: set[int] = set()
        # Kept: a call that nobody holds any more is cancelled.
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        for part in call:
            begun |= {output.index for output in part.outputs}
            if len(begun) == 2:
                break
        wait_until(lambda: figure(served, "kv_blocks", state="held") > 0, "blocks are held")
    _is_at_rest(served)
    wait_until(lambda: _aborted(served) == aborted + 2, "both sequences were aborted")


def _aborted(served: Served) -> float:
    return figure(served, "request_success_total", finished_reason="abort")


def _is_at_rest(served: Served) -> None:
    wait_until(lambda: figure(served, "num_requests_in_flight") == 0, "the request has ended")
    wait_until(lambda: figure(served, "num_requests_running") == 0, "the engine stops")
    wait_until(lambda: figure(served, "kv_blocks", state="held") == 0, "its blocks are back")


def test_metrics_have_vllms_names(served: Served) -> None:
    complete(served, "One", max_tokens=3)
    told = dict(re.findall(r"^# TYPE pagewire_(\S+) (\S+)$", scrape(served), re.M))
    for kind, names in METRICS.items():
        for name in names.split():
            # The text format of Prometheus has the suffix of a counter in its name.
            assert told.get(f"{name}_total" if kind == "counter" else name) == kind, name
