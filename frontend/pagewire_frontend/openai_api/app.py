"""The FastAPI application: routes, and errors in OpenAI's shape wherever they arise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import pagewire
from pagewire_frontend.faults import as_pagewire_error
from pagewire_frontend.openai_api import operations, vectors
from pagewire_frontend.openai_api.access import AccessMiddleware
from pagewire_frontend.openai_api.chat_completions import create_chat_completion
from pagewire_frontend.openai_api.completions import create_completion
from pagewire_frontend.openai_api.errors import error_body, error_response
from pagewire_frontend.openai_api.middleware import BodyLimitMiddleware, RequestIdMiddleware
from pagewire_frontend.openai_api.openapi import (
    RERANK_PATHS,
    SCORE_PATHS,
    Operation,
    openapi_document,
)
from pagewire_frontend.openai_api.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from pagewire_frontend.openai_api.response_input import ResponsesBody
from pagewire_frontend.openai_api.response_store import ResponseStore
from pagewire_frontend.openai_api.responses import ResponsesApi
from pagewire_frontend.openai_api.tracing import TracingMiddleware
from pagewire_frontend.openai_api.vector_bodies import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pagewire_frontend.serving import Serving
from pagewire_frontend.shutdown import Shutdown

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(serving: Serving) -> ASGIApp:
    """The HTTP API over one engine."""
    # No interactive pages: their scripts would come from elsewhere.
    app = FastAPI(
        title="pagewire",
        version=pagewire.__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, _routing_error)
    described: list[Operation] = []
    app.openapi = cache(lambda: openapi_document(described))  # type: ignore[method-assign]  # its way

    def route(method: str, path: str, endpoint: Endpoint, body: type[BaseModel] | None) -> None:
        app.add_api_route(
            path,
            _answering_errors(endpoint, serving.shutdown),
            # Load balancers ask for heads; the server leaves the body out.
            methods=["GET", "HEAD"] if method == "GET" else [method],
            response_class=Response,
            name=endpoint.__name__,
        )
        described.append(Operation(method, path, endpoint.__name__, body))

    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(serving, request)

    async def completions(request: Request) -> Response:
        return await create_completion(serving, request)

    async def models(request: Request) -> Response:
        return operations.list_models(serving)

    async def model(request: Request) -> Response:
        return await operations.get_model(serving, request.path_params["name"])

    async def health(request: Request) -> Response:
        return operations.health(serving)

    async def live(request: Request) -> Response:
        return operations.json_response({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return await operations.metrics(serving)

    async def version(request: Request) -> Response:
        return operations.version()

    async def tokenize(request: Request) -> Response:
        return await operations.tokenize(serving, request)

    async def detokenize(request: Request) -> Response:
        return await operations.detokenize(serving, request)

    async def load_lora_adapter(request: Request) -> Response:
        return await operations.load_lora_adapter(serving, request)

    async def unload_lora_adapter(request: Request) -> Response:
        return await operations.unload_lora_adapter(serving, request)

    async def tokenizer_info(request: Request) -> Response:
        return operations.tokenizer_info(serving)

    async def embeddings(request: Request) -> Response:
        return await vectors.create_embeddings(serving, request)

    async def pooling(request: Request) -> Response:
        return await vectors.create_pooling(serving, request)

    async def classify(request: Request) -> Response:
        return await vectors.create_classification(serving, request)

    async def score(request: Request) -> Response:
        return await vectors.create_score(serving, request)

    async def rerank(request: Request) -> Response:
        return await vectors.create_rerank(serving, request)

    responses = ResponsesApi(serving, ResponseStore(int(serving.config.response_store)))
    route("POST", "/v1/responses", responses.create, ResponsesBody)
    route("GET", "/v1/responses/{response_id}", responses.get, None)
    route("GET", "/v1/responses/{response_id}/input_items", responses.input_items, None)
    route("DELETE", "/v1/responses/{response_id}", responses.delete, None)
    route("POST", "/v1/chat/completions", chat_completions, ChatBody)
    route("POST", "/v1/completions", completions, CompletionBody)
    route("POST", "/v1/embeddings", embeddings, EmbeddingBody)
    route("POST", "/pooling", pooling, PoolingBody)
    route("POST", "/classify", classify, ClassifyBody)
    # Each client has its own idea of the version: vLLM's, Jina's and Cohere's (also its v2).
    for path in SCORE_PATHS:
        route("POST", path, score, ScoreBody)
    for path in RERANK_PATHS:
        route("POST", path, rerank, RerankBody)
    route("GET", "/v1/models", models, None)
    route("GET", "/v1/models/{name:path}", model, None)
    route("GET", "/health", health, None)
    route("GET", "/health/live", live, None)
    route("GET", "/ping", health, None)
    route("GET", "/metrics", metrics, None)
    route("GET", "/version", version, None)
    route("POST", "/tokenize", tokenize, TokenizeBody)
    route("POST", "/detokenize", detokenize, DetokenizeBody)
    route("GET", "/tokenizer_info", tokenizer_info, None)
    route("POST", "/v1/load_lora_adapter", load_lora_adapter, LoadAdapterBody)
    route("POST", "/v1/unload_lora_adapter", unload_lora_adapter, UnloadAdapterBody)
    return _protected(app, serving)


def create_worker_app(serving: Serving) -> ASGIApp:
    """What one of several workers tells its siblings and their parent, on a socket of its own."""
    answers: dict[str, Callable[[], Response]] = {
        "/health": lambda: operations.health(serving),
        "/health/live": lambda: operations.json_response({"status": "ok"}),
        "/metrics": lambda: operations.own_metrics(serving),
    }

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            make = answers.get(scope["path"], lambda: Response(status_code=404))
            await make()(scope, receive, send)

    return answer


def _protected(app: ASGIApp, serving: Serving) -> ASGIApp:
    """The application behind its middleware, the outermost last."""
    config = serving.config
    app = BodyLimitMiddleware(app, config.max_request_bytes)
    if serving.tracing is not None:
        # Inside: who has no key fills no collector.
        app = TracingMiddleware(app, serving.tracing)
    app = AccessMiddleware(app, serving.access, open_metrics=config.open_metrics)
    app = RequestIdMiddleware(app)
    if config.cors_origin:
        # Outside: browsers ask beforehand, without a key, and must be able to read errors too.
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            max_age=3600,
        )
    return app


def _answering_errors(endpoint: Endpoint, shutdown: Shutdown) -> Endpoint:
    async def answering(request: Request) -> Response:
        try:
            async with shutdown.bounds():
                return await endpoint(request)
        except Exception as error:
            return error_response(as_pagewire_error(error))

    return answering


async def _routing_error(request: Request, error: Exception) -> Response:
    """404 and 405."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    text = {
        404: f"there is no {request.url.path} here",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(status, str(getattr(error, "detail", "")))
    return Response(error_body(status, text), status, headers, media_type="application/json")
