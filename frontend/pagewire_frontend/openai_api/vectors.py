"""`POST /v1/embeddings`, `/pooling`, `/classify`, `/score` and `/v1/rerank`, under all of their
names."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingParams, Task
from pagewire_frontend.metered_generation import Usage
from pagewire_frontend.openai_api.body_reading import read_body
from pagewire_frontend.openai_api.chunks import usage_block
from pagewire_frontend.openai_api.event_stream import unless_disconnected
from pagewire_frontend.openai_api.vector_bodies import (
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    read_prompts,
)
from pagewire_frontend.pooling import PoolingPrompt, PoolingRequest
from pagewire_frontend.scoring import Scoring
from pagewire_frontend.serving import PooledPrompts, Serving

# Vectors that are written before others have their turn.
_VECTORS_A_TURN = 32


async def create_embeddings(serving: Serving, request: Request) -> Response:
    """OpenAI's embeddings."""
    body = await read_body(request, EmbeddingBody)
    params = PoolingParams(
        task=Task.EMBED, dimensions=body.dimensions, use_activation=body.normalize
    )
    pooled = await _pool(
        serving, request, _input_request(request, body, params), {"use_activation": "normalize"}
    )
    if pooled is None:
        return Response()
    items = (
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(pooled.vectors)
    )
    return await _answer(serving, request, "embd", items, pooled.usage)


async def create_pooling(serving: Serving, request: Request) -> Response:
    """vLLM's pooling: whatever vector the model gives."""
    body = await read_body(request, PoolingBody)
    classifies = Task.CLASSIFY in serving.generation.model_info.tasks
    task = Task.CLASSIFY if classifies else Task.EMBED
    params = PoolingParams(
        task=task if body.task is None else Task(body.task),
        dimensions=body.dimensions,
        use_activation=body.use_activation,
    )
    pooled = await _pool(serving, request, _input_request(request, body, params))
    if pooled is None:
        return Response()
    items = (
        {"object": "pooling", "index": index, "data": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(pooled.vectors)
    )
    return await _answer(serving, request, "pool", items, pooled.usage)


async def create_classification(serving: Serving, request: Request) -> Response:
    """vLLM's classification."""
    body = await read_body(request, ClassifyBody)
    params = PoolingParams(task=Task.CLASSIFY, use_activation=body.use_activation)
    pooled = await _pool(serving, request, _input_request(request, body, params))
    if pooled is None:
        return Response()
    pooling = serving.generation.model_info.pooling
    labels = () if pooling is None else pooling.labels
    items = (
        {
            "index": index,
            "label": labels[max(range(len(vector)), key=vector.__getitem__)],
            "probs": vector,
            "num_classes": len(vector),
        }
        for index, vector in enumerate(pooled.vectors)
    )
    return await _answer(serving, request, "classify", items, pooled.usage)


async def create_score(serving: Serving, request: Request) -> Response:
    """vLLM's scores."""
    body = await read_body(request, ScoreBody)
    queries, texts = read_prompts("text_1", body.text_1), read_prompts("text_2", body.text_2)
    if len(queries) > 1 and len(queries) != len(texts):
        raise InvalidArgumentError(
            "text_1", f"has {len(queries)} texts, and text_2 {len(texts)}; give one, or as many"
        )
    scored = await _score(serving, request, body, queries, texts, body.use_activation)
    if scored is None:
        return Response()
    scores, usage = scored
    items = (
        {"object": "score", "index": index, "score": score} for index, score in enumerate(scores)
    )
    return await _answer(serving, request, "score", items, usage)


async def create_rerank(serving: Serving, request: Request) -> Response:
    """Jina's and Cohere's reranking: the best documents first."""
    body = await read_body(request, RerankBody)
    texts = body.texts()
    if body.top_n is not None and body.top_n < 1:
        raise InvalidArgumentError("top_n", f"must be at least 1, not {body.top_n}")
    scored = await _score(
        serving,
        request,
        body,
        [PoolingPrompt("query", text=body.query)],
        [PoolingPrompt(f"documents[{n}]", text=text) for n, text in enumerate(texts)],
        body.use_activation,
    )
    if scored is None:
        return Response()
    scores, usage = scored
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    content = {
        "id": f"rerank-{request.state.request_id}",
        "model": serving.generation.model_info.served_model_name,
        "results": results,
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }
    return Response(orjson.dumps(content), media_type="application/json")


async def _score(
    serving: Serving,
    request: Request,
    body: PooledBody,
    queries: list[PoolingPrompt],
    texts: list[PoolingPrompt],
    use_activation: bool | None,
) -> tuple[list[float], Usage] | None:
    common = _pooling_request(
        request, body, [], PoolingParams(task=Task.CLASSIFY, use_activation=use_activation)
    )
    generation = serving.generation
    generation.check_model(common.model)
    scoring = Scoring(generation.model_info, queries, texts, common)
    pooled = await _pool(serving, request, scoring.request)
    if pooled is None:
        return None
    # Thousands of long vectors take most of a second.
    return await asyncio.to_thread(scoring.scores, pooled.vectors), pooled.usage


async def _pool(
    serving: Serving,
    request: Request,
    pooling_request: PoolingRequest,
    field_names: dict[str, str] | None = None,
) -> PooledPrompts | None:
    """None: the client left, and all was aborted."""
    work = serving.pool(pooling_request, field_names or {})
    return await unless_disconnected(request.receive, work)


def _input_request(request: Request, body: InputBody, params: PoolingParams) -> PoolingRequest:
    adds_tokens = body.add_special_tokens is not False
    return _pooling_request(request, body, body.prompts(), params, add_special_tokens=adds_tokens)


def _pooling_request(
    request: Request,
    body: PooledBody,
    prompts: list[PoolingPrompt],
    params: PoolingParams,
    *,
    add_special_tokens: bool = True,
) -> PoolingRequest:
    return PoolingRequest(
        prompts=prompts,
        params=params,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        request_id=request.state.request_id,
        model=body.model or "",
        add_special_tokens=add_special_tokens,
        tenant=request.state.tenant,
        priority=body.priority or 0,
    )


def _encoded(vector: list[float], encoding_format: str | None) -> list[float] | str:
    """Numbers, or their little-endian float32 bytes in base64."""
    if encoding_format != "base64":
        return vector
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


async def _answer(
    serving: Serving, request: Request, kind: str, items: Iterable[dict[str, Any]], usage: Usage
) -> Response:
    """The list of all items. Thousands of vectors take a while to write: in between others have
    their turn."""
    written: list[bytes] = []
    for item in items:
        written.append(orjson.dumps(item))
        if len(written) % _VECTORS_A_TURN == 0:
            await asyncio.sleep(0)
    head = {
        "id": f"{kind}-{request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": serving.generation.model_info.served_model_name,
        "usage": usage_block(usage),
    }
    content = orjson.dumps(head)[:-1] + b',"data":[' + b",".join(written) + b"]}"
    return Response(content, media_type="application/json")
