"""Embeddings, classes, scores and rankings over HTTP and gRPC: shapes, limits, and what is refused
by name. The engine's vectors are decided beforehand."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from pagewire.errors import UnavailableError
from pagewire.pooling import PoolingInfo, Task
from pagewire.v1 import inference_pb2, pooling_pb2
from pagewire_frontend.generation_types import MAX_PROMPTS
from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.serving import Serving
from tests.fakes.fake_engine_client import FakeEngineClient, ids_of
from tests.fakes.frontend import http_client, make_serving
from tests.unit.api.refusals import Context, error_of, post, refused

EMBEDS = {"tasks": (Task.EMBED, Task.SCORE), "pooling": PoolingInfo(8)}
CLASSIFIES = {"tasks": (Task.CLASSIFY,), "pooling": PoolingInfo(3, labels=("a", "b", "c"))}
CROSS_ENCODES = {
    "tasks": (Task.CLASSIFY, Task.SCORE),
    "pooling": PoolingInfo(1, labels=("relevant",)),
}


def embedder(**options: Any) -> FakeEngineClient:
    return FakeEngineClient(**(EMBEDS | options))


async def serving_of(engine: FakeEngineClient, **config: Any) -> Serving:
    return await make_serving(engine, **config)


@pytest.fixture
def engine() -> FakeEngineClient:
    return embedder(max_model_len=32)


@pytest.fixture
async def serving(engine: FakeEngineClient) -> Serving:
    return await serving_of(engine)


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(serving) as client:
        yield client


def counts(text: str) -> list[float]:
    """What the scripted engine makes of a text."""
    vector = [0.0] * 8
    for token_id in ids_of(text):
        vector[token_id % 8] += 1.0
    return vector


# Embeddings over HTTP ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "you"], ["hello", "you"]),
        (ids_of("hello"), ["hello"]),
        ([ids_of("hello"), ids_of("you"), ids_of("hello")], ["hello", "you", "hello"]),
        ([ids_of("hello"), "you"], ["hello", "you"]),
    ],
)
async def test_input_is_a_text_or_token_ids_or_a_list(
    http: httpx.AsyncClient, given: Any, texts: list[str]
) -> None:
    response = await post(http, "/v1/embeddings", input=given, model="fake-model")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list"
    assert body["model"] == "fake-model"
    assert body["data"] == [
        {"object": "embedding", "index": n, "embedding": counts(text)}
        for n, text in enumerate(texts)
    ]
    num_tokens = sum(len(ids_of(text)) for text in texts)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (num_tokens, num_tokens)
    assert usage["completion_tokens"] == 0


async def test_base64_is_little_endian_float32(http: httpx.AsyncClient) -> None:
    response = await post(http, "/v1/embeddings", input="hello", encoding_format="base64")
    data = base64.b64decode(response.json()["data"][0]["embedding"], validate=True)
    assert list(struct.unpack("<8f", data)) == counts("hello")


async def test_what_is_asked_of_the_engine(
    http: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    await post(http, "/v1/embeddings", input="hello", normalize=False, priority=3)
    (request,) = engine.requests
    assert request.pooling is not None
    assert (request.pooling.task, request.pooling.use_activation) == (Task.EMBED, False)
    assert request.priority == 3
    assert engine.live == set()


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": 3}),
        ("input", {"input": {"a": 1}}),
        ("input", {"input": None}),
        ("input", {"input": ""}),
        ("input", {"input": [1, "a"]}),
        ("input", {"input": [1, True]}),
        ("input", {"input": [1, 2.5]}),
        ("input[0]", {"input": [True]}),
        ("input[0]", {"input": [1.0]}),
        ("input[1]", {"input": ["a", ""]}),
        ("input[1]", {"input": ["a", []]}),
        ("input[1]", {"input": ["a", ["b"]]}),
        ("input[1]", {"input": ["a", None]}),
        ("input[1]", {"input": [[1], [259]]}),
        ("input[1]", {"input": [[1], [-1]]}),
        ("input[0]", {"input": [[10**4000]]}),
        ("input[1]", {"input": ["a", "x" * 33]}),
        ("input", {"input": [1] * 33}),
        ("", {"input": ["half \ud800"]}),  # found while the body is read
        ("input", {"input": ["a"] * (MAX_PROMPTS + 1)}),
        ("encoding_format", {"input": "a", "encoding_format": "hex"}),
        ("dimensions", {"input": "a", "dimensions": 4}),
        ("dimensions", {"input": "a", "dimensions": 0}),
        ("dimensions", {"input": "a", "dimensions": "4"}),
        ("normalize", {"input": "a", "normalize": "no"}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 0}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 33}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": -2}),
        ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": float("nan")}),
        ("priority", {"input": "a", "priority": -1}),
        ("messages", {"input": "a", "messages": [{"role": "user", "content": "x"}]}),
        ("embed_dtype", {"input": "a", "embed_dtype": "float16"}),
    ],
)
async def test_bad_embedding_requests_are_refused_by_name(
    http: httpx.AsyncClient, engine: FakeEngineClient, field: str, body: dict[str, Any]
) -> None:
    error = error_of(await post(http, "/v1/embeddings", **body))
    assert error["param"] == (field or None)
    assert engine.requests == []


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient) -> None:
    response = await post(http, "/v1/embeddings", input="a", model="other")
    assert error_of(response, 404)["code"] == "model_not_found"


async def test_a_text_that_is_too_long_says_how_to_have_it_cut(
    http: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    error = error_of(await post(http, "/v1/embeddings", input="x" * 40))
    assert "truncate_prompt_tokens=-1" in error["message"]
    assert "takes 32" in error["message"]
    for asked, kept in ((-1, 32), (5, 5)):
        for given in ("x" * 40, ids_of("x" * 40)):
            response = await post(http, "/v1/embeddings", input=given, truncate_prompt_tokens=asked)
            assert response.json()["usage"]["prompt_tokens"] == kept
            assert len(engine.requests[-1].prompt_token_ids) == kept


async def test_shorter_vectors_come_of_models_that_declare_them() -> None:
    engine = embedder(pooling=PoolingInfo(8, dimensions=(2, 4)))
    async with http_client(await serving_of(engine)) as http:
        response = await post(http, "/v1/embeddings", input="hello", dimensions=4)
        assert len(response.json()["data"][0]["embedding"]) == 4
        error = error_of(await post(http, "/v1/embeddings", input="hello", dimensions=3))
        assert (error["param"], "2, 4" in error["message"]) == ("dimensions", True)


async def test_many_inputs_come_back_in_order(
    http: httpx.AsyncClient, engine: FakeEngineClient
) -> None:
    texts = [chr(97 + n % 26) * (1 + n % 7) for n in range(MAX_PROMPTS)]
    response = await post(http, "/v1/embeddings", input=texts)
    assert [item["embedding"] for item in response.json()["data"]] == [
        counts(text) for text in texts
    ]


async def test_one_failure_fails_the_call_and_aborts_the_rest() -> None:
    engine = embedder(fail_after=0, failure=UnavailableError("gone"))
    async with http_client(await serving_of(engine)) as http:
        error_of(await post(http, "/v1/embeddings", input=["a"] * 5), 503)
    assert engine.live == set()


async def test_what_was_pooled_is_counted(serving: Serving, http: httpx.AsyncClient) -> None:
    await post(http, "/v1/embeddings", input=["hello", "you"])
    await post(http, "/v1/embeddings", input=["hello"], dimensions=3)
    figures = (await http.get("/metrics")).text
    for line in (
        'pagewire_prompt_tokens_total{model_name="fake-model"} 8.0',
        'pagewire_request_success_total{finished_reason="stop",model_name="fake-model"} 2.0',
        'pagewire_request_failure_total{code="INVALID_ARGUMENT",model_name="fake-model"} 1.0',
        'pagewire_request_prompt_tokens_count{model_name="fake-model"} 2.0',
    ):
        assert line in figures
    assert serving.metrics._in_flight._value.get() == 0


# The other routes --------------------------------------------------------------------------------


async def test_pooling_gives_what_the_model_gives(http: httpx.AsyncClient) -> None:
    body = (await post(http, "/pooling", input=["hello"])).json()
    assert body["data"] == [{"object": "pooling", "index": 0, "data": counts("hello")}]
    async with http_client(await serving_of(FakeEngineClient(**CLASSIFIES))) as classifier:
        body = (await post(classifier, "/pooling", input="hello")).json()
        assert body["data"][0]["data"] == [0.0, 0.1, 0.2]
        error = error_of(await post(classifier, "/pooling", input="hello", task="embed"))
        assert "gives no embeddings" in error["message"]
        assert error_of(await post(classifier, "/pooling", input="x", task="token_embed"))[
            "param"
        ] == ("task")


async def test_classes_have_names() -> None:
    async with http_client(await serving_of(FakeEngineClient(**CLASSIFIES))) as http:
        body = (await post(http, "/classify", input=["hello", "you"])).json()
        assert body["data"] == [
            {"index": n, "label": "c", "probs": [0.0, 0.1, 0.2], "num_classes": 3} for n in (0, 1)
        ]


@pytest.mark.parametrize(
    ("text_1", "text_2", "scores"),
    [
        ("aab", "aab", [1.0]),
        ("a", ["a", "i", "b"], [1.0, 1.0, 0.0]),  # i is the 8th letter after a
        (["a", "b"], ["b", "b"], [0.0, 1.0]),
        (ids_of("a"), [ids_of("a"), ids_of("b")], [1.0, 0.0]),
    ],
)
async def test_a_score_is_the_cosine_of_embeddings(
    http: httpx.AsyncClient, engine: FakeEngineClient, text_1: Any, text_2: Any, scores: list[float]
) -> None:
    body = (await post(http, "/score", text_1=text_1, text_2=text_2)).json()
    assert [item["score"] for item in body["data"]] == pytest.approx(scores)
    one_query = not isinstance(text_1, list) or isinstance(text_1[0], int)
    # A query that is compared with several texts is computed once.
    assert len(engine.requests) == (1 if one_query else len(text_1)) + len(scores)


async def test_a_cross_encoder_scores_pairs_in_one_prompt() -> None:
    engine = FakeEngineClient(**CROSS_ENCODES)
    async with http_client(await serving_of(engine)) as http:
        body = (await post(http, "/score", text_1="q", text_2=["one", "two"])).json()
        assert [item["score"] for item in body["data"]] == [0.0, 0.0]
        # This tokenizer has no token types and puts nothing between the two.
        assert [request.prompt_token_ids for request in engine.requests] == [
            ids_of("qone"),
            ids_of("qtwo"),
        ]
        error = error_of(await post(http, "/score", text_1=[1], text_2="x"))
        assert "pairs of texts" in error["message"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("text_1", {"text_2": "a"}),
        ("text_2", {"text_1": "a"}),
        ("text_2", {"text_1": "a", "text_2": []}),
        ("text_1", {"text_1": ["a", "b"], "text_2": ["a"]}),
        ("text_1", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("text_2[1]", {"text_1": "a", "text_2": ["a", ""]}),
        ("text_1", {"text_1": "", "text_2": ["a"]}),
    ],
)
async def test_bad_score_requests_are_refused_by_name(
    http: httpx.AsyncClient, field: str, body: dict[str, Any]
) -> None:
    assert error_of(await post(http, "/score", **body))["param"] == field


async def test_reranking_gives_the_best_first(http: httpx.AsyncClient) -> None:
    documents = ["b", {"text": "ab"}, "a", "c"]
    body = (await post(http, "/v1/rerank", query="a", documents=documents, top_n=2)).json()
    results = body["results"]
    assert [(each["index"], each["document"]) for each in results] == [
        (2, {"text": "a"}),
        (1, {"text": "ab"}),
    ]
    assert results[0]["relevance_score"] == pytest.approx(1.0)
    assert body["usage"]["total_tokens"] == 6
    bare = await post(
        http, "/v1/rerank", query="a", documents=documents, return_documents=False, top_n=99
    )
    assert [set(each) for each in bare.json()["results"]] == [{"index", "relevance_score"}] * 4


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("query", {"documents": ["a"]}),
        ("query", {"query": ["a"], "documents": ["a"]}),
        ("documents", {"query": "a"}),
        ("documents", {"query": "a", "documents": []}),
        ("documents", {"query": "a", "documents": "a"}),
        ("documents", {"query": "a", "documents": ["a"] * (MAX_PROMPTS + 1)}),
        ("documents[1]", {"query": "a", "documents": ["a", 3]}),
        ("documents[1]", {"query": "a", "documents": ["a", {"title": "x"}]}),
        ("top_n", {"query": "a", "documents": ["a"], "top_n": 0}),
        ("max_tokens_per_doc", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 9}),
    ],
)
async def test_bad_rerank_requests_are_refused_by_name(
    http: httpx.AsyncClient, field: str, body: dict[str, Any]
) -> None:
    assert error_of(await post(http, "/v1/rerank", **body))["param"] == field


@pytest.mark.parametrize(
    ("path", "other", "key"),
    [
        ("/score", "/v1/score", "data"),
        ("/v1/rerank", "/rerank", "results"),
        ("/v1/rerank", "/v2/rerank", "results"),
    ],
)
async def test_routes_of_other_names_are_the_same(path: str, other: str, key: str) -> None:
    config = {"api_key": "k", "max_request_bytes": 1024}
    engine = embedder()
    serving = await serving_of(engine, **config)
    told: list[Any] = []
    async with http_client(serving) as http:
        for each in (path, other):
            assert (await post(http, each, **ROUTES[each])).status_code == 401
            assert (await http.get(each, headers={"Authorization": "Bearer k"})).status_code == 405
            http.headers["Authorization"] = "Bearer k"
            document = (await http.get("/openapi.json")).json()["paths"][each]["post"]
            long = await post(http, each, **ROUTES[each], user="x" * 1024)
            answer = (await post(http, each, **ROUTES[each])).json()
            counted = [
                line
                for line in (await http.get("/metrics")).text.splitlines()
                if line.startswith("pagewire_prompt_tokens_total")
            ]
            told.append(
                (document["requestBody"], document["responses"], long.status_code, answer[key])
            )
            assert counted
            assert float(counted[0].split()[-1]) == len(told) * 2
            del http.headers["Authorization"]
    assert told[0] == told[1]
    assert told[0][2] == 413


# What a model can't do ---------------------------------------------------------------------------

ROUTES = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_model_that_generates_refuses_vectors_with_the_remedy(path: str) -> None:
    async with http_client(await serving_of(FakeEngineClient())) as http:
        error = error_of(await post(http, path, **ROUTES[path]))
    assert error["param"] == "model"
    assert error["code"] == "failed_precondition"
    remedy = "sequence classifier" if path == "/classify" else "--runner pooling"
    assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_model_that_pools_refuses_to_generate(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    error = error_of(await post(http, path, **body))
    assert error["param"] == "model"
    assert "generates no text" in error["message"]


async def test_models_say_what_they_can_do(http: httpx.AsyncClient, serving: Serving) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["tasks"] == ["embed", "score"]
    listed = await InferenceServicer(serving).ListModels(
        inference_pb2.ListModelsRequest(), Context()
    )
    assert list(listed.models[0].tasks) == [pooling_pb2.TASK_EMBED, pooling_pb2.TASK_SCORE]
    assert listed.models[0].embedding_size == 8


async def test_an_engine_without_a_tokenizer_takes_token_ids() -> None:
    async with http_client(await serving_of(embedder(has_tokenizer=False))) as http:
        response = await post(http, "/v1/embeddings", input=ids_of("hello"))
        assert response.json()["data"][0]["embedding"] == counts("hello")
        error = error_of(await post(http, "/v1/embeddings", input="hello"))
        assert "token ids only" in error["message"]


# gRPC --------------------------------------------------------------------------------------------


async def call(serving: Serving, method: str, request: Any) -> Any:
    return await getattr(InferenceServicer(serving), method)(request, Context())


async def test_grpc_embeds_texts_and_token_ids(serving: Serving) -> None:
    request = inference_pb2.EmbedRequest(texts=["hello", "you"])
    response = await call(serving, "Embed", request)
    assert [list(each.values) for each in response.embeddings] == [counts("hello"), counts("you")]
    assert response.model == "fake-model"
    assert response.usage.prompt_tokens == 8
    ids = inference_pb2.TokenIds(ids=ids_of("hello"))
    response = await call(serving, "Embed", inference_pb2.EmbedRequest(token_ids=[ids]))
    assert list(response.embeddings[0].values) == counts("hello")


async def test_grpc_classifies_and_scores(serving: Serving) -> None:
    classifier = await serving_of(FakeEngineClient(**CLASSIFIES))
    response = await call(classifier, "Classify", inference_pb2.ClassifyRequest(texts=["x"]))
    assert list(response.labels) == ["a", "b", "c"]
    assert list(response.probabilities[0].values) == pytest.approx([0.0, 0.1, 0.2])
    request = inference_pb2.ScoreRequest(query="a", texts=["a", "b"])
    assert list((await call(serving, "Score", request)).scores) == pytest.approx([1.0, 0.0])
    request = inference_pb2.ScoreRequest(queries=["a", "b"], texts=["b", "b"])
    assert list((await call(serving, "Score", request)).scores) == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("Embed", inference_pb2.EmbedRequest(), "texts"),
        ("Embed", inference_pb2.EmbedRequest(texts=["a"] * (MAX_PROMPTS + 1)), "texts"),
        ("Embed", inference_pb2.EmbedRequest(texts=["a", ""]), "texts[1]"),
        ("Embed", inference_pb2.EmbedRequest(texts=["a"], dimensions=3), "dimensions"),
        ("Embed", inference_pb2.EmbedRequest(texts=["a"], dimensions=0), "dimensions"),
        (
            "Embed",
            inference_pb2.EmbedRequest(texts=["a"], token_ids=[{"ids": [1]}]),
            "token_ids",
        ),
        ("Embed", inference_pb2.EmbedRequest(token_ids=[{"ids": []}]), "token_ids[0]"),
        ("Embed", inference_pb2.EmbedRequest(token_ids=[{"ids": [2**32 - 1]}]), "token_ids[0]"),
        (
            "Embed",
            inference_pb2.EmbedRequest(texts=["a"], truncate_prompt_tokens=99),
            "truncate_prompt_tokens",
        ),
        ("Embed", inference_pb2.EmbedRequest(texts=["a"], priority=-1), "priority"),
        ("Score", inference_pb2.ScoreRequest(query="a"), "texts"),
        ("Score", inference_pb2.ScoreRequest(query="a", queries=["a"], texts=["b"]), "queries"),
        ("Score", inference_pb2.ScoreRequest(queries=["a", "b"], texts=["b"]), "queries"),
        ("Score", inference_pb2.ScoreRequest(texts=["b"]), "query"),
    ],
)
async def test_grpc_refuses_bad_requests_by_name(
    serving: Serving, method: str, request_message: Any, field: str
) -> None:
    context = await refused(serving, method, request_message)
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert context.violations() == [field]


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Embed", inference_pb2.EmbedRequest(texts=["a"])),
        ("Classify", inference_pb2.ClassifyRequest(texts=["a"])),
        ("Score", inference_pb2.ScoreRequest(query="a", texts=["a"])),
    ],
)
async def test_grpc_says_what_a_model_that_generates_can_not_do(
    method: str, request_message: Any
) -> None:
    context = await refused(await serving_of(FakeEngineClient()), method, request_message)
    assert context.code == grpc.StatusCode.FAILED_PRECONDITION


async def test_grpc_refuses_to_generate_what_only_pools(serving: Serving) -> None:
    for method, request in (
        ("GenerateUnary", inference_pb2.GenerateRequest(text="a")),
        (
            "ChatUnary",
            inference_pb2.ChatRequest(messages=[{"role": "user", "content": [{"text": "a"}]}]),
        ),
    ):
        context = await refused(serving, method, request)
        assert context.code == grpc.StatusCode.FAILED_PRECONDITION
        assert "generates no text" in context.status.message
