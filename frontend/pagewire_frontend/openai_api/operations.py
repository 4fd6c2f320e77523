"""The routes beside generation: models, health, metrics, version, tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

import pagewire
from pagewire.v1 import engine_pb2
from pagewire_frontend import token_service
from pagewire_frontend.faults import renaming
from pagewire_frontend.metrics import CONTENT_TYPE
from pagewire_frontend.openai_api.body_reading import read_body
from pagewire_frontend.openai_api.chat_request import rendered_chat
from pagewire_frontend.openai_api.event_stream import unless_disconnected
from pagewire_frontend.openai_api.requests import (
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from pagewire_frontend.serving import Serving
from pagewire_frontend.template_files import DEFAULT_TEMPLATE


def json_response(content: Any, status: int = 200) -> Response:
    """JSON by orjson."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def health(serving: Serving) -> Response:
    """200 while requests are served, else 503."""
    if serving.ready:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": serving.not_ready_reason}, 503)


def version() -> Response:
    return json_response({"version": pagewire.__version__})


async def metrics(serving: Serving) -> Response:
    return Response(await serving.scrape(), media_type=CONTENT_TYPE)


def own_metrics(serving: Serving) -> Response:
    return Response(serving.own_metrics(), media_type=CONTENT_TYPE)


def list_models(serving: Serving) -> Response:
    """The served model, and the adapters that requests may name in its place."""
    cards = [_model(serving)]
    cards += [_adapter(serving, info) for info in serving.generation.adapters.known()]
    return json_response({"object": "list", "data": cards})


async def get_model(serving: Serving, name: str) -> Response:
    """One model's card. Raises NotFoundError."""
    generation = serving.generation
    await generation.find_model(name)
    adapter = generation.adapters.find(name)
    return json_response(_model(serving) if adapter is None else _adapter(serving, adapter.info))


def _model(serving: Serving) -> dict[str, Any]:
    info = serving.generation.model_info
    return {
        "id": info.served_model_name,
        "object": "model",
        "created": info.created,
        "owned_by": "pagewire",
        "root": info.served_model_name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "tasks": info.tasks,
    }


def _adapter(serving: Serving, info: engine_pb2.AdapterInfo) -> dict[str, Any]:
    return _model(serving) | {
        "id": info.name,
        "created": info.loaded_at,
        "root": info.root,
        "parent": info.parent,
    }


async def load_lora_adapter(serving: Serving, request: Request) -> Response:
    """`{"lora_name": name, "lora_path": folder}` becomes a model that requests may name."""
    body = await read_body(request, LoadAdapterBody)
    asked = engine_pb2.LoadAdapterRequest(
        name=body.lora_name,
        path=body.lora_path,
        base_model_name=body.base_model_name or "",
        in_place=bool(body.load_inplace),
    )
    with renaming({"name": "lora_name", "path": "lora_path"}):
        info = await serving.managed_adapters.load(asked)
    return json_response(_adapter(serving, info) | {"version": info.version, "rank": info.rank})


async def unload_lora_adapter(serving: Serving, request: Request) -> Response:
    """`{"lora_name": name}` goes when its requests have ended."""
    body = await read_body(request, UnloadAdapterBody)
    modes = engine_pb2.UnloadAdapterRequest
    asked = engine_pb2.UnloadAdapterRequest(
        name=body.lora_name, mode=modes.MODE_ABORT if body.abort else modes.MODE_WAIT
    )
    if body.timeout_s is not None:
        asked.timeout_s = body.timeout_s
    with renaming({"name": "lora_name"}):
        unloading = serving.managed_adapters.unload(asked)
        response = await unless_disconnected(request.receive, unloading)
    # Nobody reads an answer after the client has left.
    ended = 0 if response is None else response.num_ended_requests
    return json_response({"id": body.lora_name, "deleted": True, "ended_requests": ended})


async def tokenize(serving: Serving, request: Request) -> Response:
    """`{"prompt": text}` to its token ids, or `{"messages": [...]}` to those of their prompt."""
    body = await read_body(request, TokenizeBody)
    body.check()
    generation = await serving.generation.find_model(body.model or "")
    if body.messages is not None:
        with renaming({"prompt": "messages"}):
            rendered = await rendered_chat(
                generation, request, body.messages, body, body.shown_tools()
            )
        token_ids = rendered.token_ids
        # On a thread: there may be as many as the model takes.
        texts = await asyncio.to_thread(
            lambda: [generation.tokenizer.token_text(token_id) for token_id in token_ids]
        )
    else:
        with renaming({"text": "prompt"}):
            token_ids, texts = await token_service.tokenize(
                generation,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens is not False,
            )
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": generation.model_info.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
    )


async def detokenize(serving: Serving, request: Request) -> Response:
    """`{"tokens": ids}` to their text."""
    body = await read_body(request, DetokenizeBody)
    generation = await serving.generation.find_model(body.model or "")
    with renaming({"token_ids": "tokens"}):
        text = await token_service.detokenize(generation, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


def tokenizer_info(serving: Serving) -> Response:
    """The control tokens by role, and the chat template, where there is one: what lm-eval's remote
    tokenizer reads."""
    generation = serving.generation
    told = dict(generation.tokenizer.special_tokens)
    template = generation.chat_template.templates.get(DEFAULT_TEMPLATE)
    return json_response(told if template is None else told | {"chat_template": template})
