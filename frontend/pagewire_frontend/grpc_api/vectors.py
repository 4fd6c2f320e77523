"""Embed, Classify and Score."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingParams, Task
from pagewire.sampling_params import check_count
from pagewire.v1 import inference_pb2
from pagewire_frontend.generation_types import MAX_PROMPTS
from pagewire_frontend.grpc_api.reply_size import check_reply_size
from pagewire_frontend.grpc_api.responses import MESSAGE_BUDGET, fill_usage
from pagewire_frontend.pooling import PoolingPrompt, PoolingRequest
from pagewire_frontend.request_ids import new_request_id
from pagewire_frontend.scoring import Scoring
from pagewire_frontend.serving import Serving

# float32; and the tags and lengths of a vector.
_BYTES_PER_NUMBER = 4
_BYTES_AROUND = 16
# What the client calls the fields that errors name.
_EMBED_FIELDS = {"use_activation": "normalize"}
_InputRequest = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest


async def embed(
    serving: Serving, request: inference_pb2.EmbedRequest, tenant: str, metadata: Any
) -> inference_pb2.EmbedResponse:
    """A vector for each text.

    Raises:
        PagewireError: the call was refused, or failed, or its answer would be too large for a
            caller with this metadata.
    """
    asked = _embed_request(request, tenant)
    # Before anything is computed for nothing.
    num_bytes = len(asked.prompts) * _embedding_bytes(serving, request)
    check_reply_size(num_bytes, metadata, "call EmbedStream, which sends it in parts")
    pooled = await serving.pool(asked, _EMBED_FIELDS)
    response = inference_pb2.EmbedResponse(
        model=_model(serving), embeddings=_embeddings(pooled.vectors)
    )
    fill_usage(response.usage, pooled.usage)
    return response


async def embed_in_parts(
    serving: Serving, request: inference_pb2.EmbedRequest, tenant: str
) -> AsyncIterator[inference_pb2.EmbedResponse]:
    """The same in messages of no more than MESSAGE_BUDGET bytes, or one vector.

    Raises:
        PagewireError: the call was refused, or failed.
    """
    pooled = await serving.pool(_embed_request(request, tenant), _EMBED_FIELDS)
    at_a_time = max(1, MESSAGE_BUDGET // _embedding_bytes(serving, request))
    model = _model(serving)
    for start in range(0, len(pooled.vectors), at_a_time):
        vectors = pooled.vectors[start : start + at_a_time]
        part = inference_pb2.EmbedResponse(model=model, embeddings=_embeddings(vectors))
        if start + at_a_time >= len(pooled.vectors):
            fill_usage(part.usage, pooled.usage)
        yield part


def _embed_request(request: inference_pb2.EmbedRequest, tenant: str) -> PoolingRequest:
    params = PoolingParams(
        task=Task.EMBED,
        dimensions=_optional(request, "dimensions"),
        use_activation=_optional(request, "normalize"),
    )
    return _pooling_request(request, params, _prompts(request), tenant)


def _embedding_bytes(serving: Serving, request: inference_pb2.EmbedRequest) -> int:
    """Of one vector in a message, at most."""
    info = serving.generation.model_info.pooling
    size = 0 if info is None else info.size
    return _BYTES_PER_NUMBER * min(size, _optional(request, "dimensions") or size) + _BYTES_AROUND


async def classify(
    serving: Serving, request: inference_pb2.ClassifyRequest, tenant: str
) -> inference_pb2.ClassifyResponse:
    """Probabilities of the classes for each text.

    Raises:
        PagewireError: the call was refused, or failed.
    """
    params = PoolingParams(task=Task.CLASSIFY, use_activation=_optional(request, "use_activation"))
    pooled = await serving.pool(_pooling_request(request, params, _prompts(request), tenant))
    info = serving.generation.model_info.pooling
    response = inference_pb2.ClassifyResponse(
        model=_model(serving),
        probabilities=_embeddings(pooled.vectors),
        labels=() if info is None else info.labels,
    )
    fill_usage(response.usage, pooled.usage)
    return response


async def score(
    serving: Serving, request: inference_pb2.ScoreRequest, tenant: str
) -> inference_pb2.ScoreResponse:
    """A number for each text.

    Raises:
        PagewireError: the call was refused, or failed.
    """
    _check_number("texts", request.texts)
    check_count("queries", request.queries, MAX_PROMPTS)
    if request.query and request.queries:
        raise InvalidArgumentError("queries", "stand in place of query: set one of the two")
    queries = _texts("queries", request.queries)
    if not queries:
        queries = [PoolingPrompt("query", text=request.query)]
    params = PoolingParams(task=Task.CLASSIFY, use_activation=_optional(request, "use_activation"))
    common = _pooling_request(request, params, [], tenant)
    generation = serving.generation
    generation.check_model(request.model)
    scoring = Scoring(generation.model_info, queries, _texts("texts", request.texts), common)
    pooled = await serving.pool(scoring.request)
    # Thousands of long vectors take most of a second.
    scores = await asyncio.to_thread(scoring.scores, pooled.vectors)
    response = inference_pb2.ScoreResponse(model=_model(serving), scores=scores)
    fill_usage(response.usage, pooled.usage)
    return response


def _prompts(request: _InputRequest) -> list[PoolingPrompt]:
    if request.texts and request.token_ids:
        raise InvalidArgumentError("token_ids", "stand in place of texts: set one of the two")
    if not request.token_ids:
        _check_number("texts", request.texts)
        return _texts("texts", request.texts)
    _check_number("token_ids", request.token_ids)
    return [
        PoolingPrompt(f"token_ids[{n}]", token_ids=list(one.ids))
        for n, one in enumerate(request.token_ids)
    ]


def _check_number(name: str, values: Sequence[Any]) -> None:
    check_count(name, values, MAX_PROMPTS)
    if not values:
        raise InvalidArgumentError(name, "must hold at least one")


def _texts(name: str, texts: Iterable[str]) -> list[PoolingPrompt]:
    return [PoolingPrompt(f"{name}[{n}]", text=text) for n, text in enumerate(texts)]


def _pooling_request(
    request: _InputRequest | inference_pb2.ScoreRequest,
    params: PoolingParams,
    prompts: list[PoolingPrompt],
    tenant: str,
) -> PoolingRequest:
    adds_tokens = True
    if not isinstance(request, inference_pb2.ScoreRequest):
        adds_tokens = _optional(request, "add_special_tokens") is not False
    return PoolingRequest(
        prompts=prompts,
        params=params,
        truncate_prompt_tokens=_optional(request, "truncate_prompt_tokens"),
        request_id=new_request_id(),
        model=request.model,
        add_special_tokens=adds_tokens,
        tenant=tenant,
        priority=request.priority,
    )


def _optional(request: Any, field: str) -> Any:
    return getattr(request, field) if request.HasField(field) else None


def _embeddings(vectors: Iterable[list[float]]) -> list[inference_pb2.Embedding]:
    return [inference_pb2.Embedding(values=vector) for vector in vectors]


def _model(serving: Serving) -> str:
    return serving.generation.model_info.served_model_name
