"""The document at /openapi.json: what each route takes and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

import pagewire
from pagewire.pooling import Task
from pagewire_frontend.openai_api.item_pages import DEFAULT_ITEMS, MOST_ITEMS, ORDERS

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_NULLABLE_TEXT = {"type": ["string", "null"]}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    Attributes:
        method: in capitals.
        path: as routed, such as `/v1/models/{name:path}`.
        name: of the function that answers.
        body: the model of its body; None: it has none.
    """

    method: str
    path: str
    name: str
    body: type[BaseModel] | None


def openapi_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1 of the operations."""
    schemas: dict[str, Any] = {"Error": _ERROR, **_ANSWERS}
    paths: dict[str, Any] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pagewire",
            "version": pagewire.__version__,
            "description": "OpenAI's API over one model. Fields that are not named here are "
            "ignored, or refused where they ask for what is not served. An answer that streams "
            "is text/event-stream.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are asked for where the operator has set some: none is an alternative.
        "security": [{"key": []}, {}],
    }


def _described(operation: Operation, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{path}").strip("_"),
        "summary": operation.name.replace("_", " "),
        "responses": {
            "200": _answer(operation, path),
            "default": _json("What was wrong, in OpenAI's shape.", _ref("Error")),
        },
    }
    if path in ("/health", "/ping"):
        described["responses"]["503"] = _json("No request would be served now.", _ref("Health"))
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
    ] + [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in _QUERY_OF.get((operation.method, path), {}).items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = operation.body.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {})
        schemas[operation.body.__name__] = schema
        content = {"application/json": {"schema": _ref(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answer(operation: Operation, path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {
            "description": "Prometheus's text format.",
            "content": {"text/plain": {"schema": _TEXT}},
        }
    name = _ANSWER_OF.get((operation.method, path))
    answer = _json("The answer.", {"type": "object"} if name is None else _ref(name))
    if operation.body is not None and "stream" in operation.body.model_fields:
        answer["content"]["text/event-stream"] = {"schema": _EVENT}
    return answer


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(model=name)}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


_EVENT = _object({"data": _TEXT, "event": _TEXT}, "event")
_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": {**_NULLABLE_TEXT, "description": "The field at fault."},
                "code": _NULLABLE_TEXT,
            }
        )
    }
)
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
)
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": _NULLABLE_TEXT,
        "max_model_len": _COUNT,
        "tasks": _list_of({"enum": [task.value for task in Task]}),
    }
)
_FINISH = {"index": _COUNT, "finish_reason": _NULLABLE_TEXT}
_NUMBER = {"type": "number"}
_VECTOR = {"description": "Numbers, or base64 of float32.", "anyOf": [_list_of(_NUMBER), _TEXT]}


def _list_answer(kind: dict[str, Any]) -> dict[str, Any]:
    """One object a prompt."""
    return _object(
        {
            "id": _TEXT,
            "object": {"const": "list"},
            "created": _COUNT,
            "model": _TEXT,
            "data": _list_of(_object({"index": _COUNT, **kind})),
            "usage": _USAGE,
        }
    )


_ANSWERS = {
    "Embeddings": _list_answer({"object": {"const": "embedding"}, "embedding": _VECTOR}),
    "Vectors": _list_answer({"object": {"const": "pooling"}, "data": _VECTOR}),
    "Classes": _list_answer({"label": _TEXT, "probs": _list_of(_NUMBER), "num_classes": _COUNT}),
    "Scores": _list_answer({"object": {"const": "score"}, "score": _NUMBER}),
    "Ranking": _object(
        {
            "id": _TEXT,
            "model": _TEXT,
            "results": _list_of(
                _object(
                    {"index": _COUNT, "relevance_score": _NUMBER, "document": {"type": "object"}},
                    "document",
                )
            ),
            "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "ChatCompletion": _object(
        {
            "id": _TEXT,
            "object": {"const": "chat.completion"},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list_of(
                _object({**_FINISH, "message": _object({"role": _TEXT, "content": _NULLABLE_TEXT})})
            ),
            "usage": _USAGE,
        }
    ),
    "Completion": _object(
        {
            "id": _TEXT,
            "object": {"const": "text_completion"},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list_of(_object({**_FINISH, "text": _TEXT})),
            "usage": _USAGE,
        }
    ),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "model": _TEXT,
            "status": {"enum": ["completed", "incomplete", "failed"]},
            "output": _list_of(_object({"id": _TEXT, "type": _TEXT, "status": _TEXT})),
        }
    ),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list_of(_MODEL)}),
    "Health": _object({"status": _TEXT, "reason": _TEXT}, "reason"),
    "Version": _object({"version": _TEXT}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list_of(_COUNT),
            "token_strs": _list_of(_TEXT),
        }
    ),
    "Prompt": _object({"prompt": _TEXT}),
}
_QUERY_OF: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/v1/responses/{response_id}/input_items"): {
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": MOST_ITEMS,
            "default": DEFAULT_ITEMS,
        },
        "order": {"enum": list(ORDERS), "default": ORDERS[0]},
        "after": _TEXT,
    },
}
_ANSWER_OF = {
    ("POST", "/v1/chat/completions"): "ChatCompletion",
    ("POST", "/v1/completions"): "Completion",
    ("POST", "/v1/responses"): "Response",
    ("GET", "/v1/responses/{response_id}"): "Response",
    ("POST", "/v1/embeddings"): "Embeddings",
    ("POST", "/pooling"): "Vectors",
    ("POST", "/classify"): "Classes",
    **{("POST", path): "Scores" for path in SCORE_PATHS},
    **{("POST", path): "Ranking" for path in RERANK_PATHS},
    ("GET", "/v1/models"): "ModelList",
    ("GET", "/v1/models/{name}"): "Model",
    ("GET", "/health"): "Health",
    ("GET", "/health/live"): "Health",
    ("GET", "/ping"): "Health",
    ("GET", "/version"): "Version",
    ("POST", "/tokenize"): "Tokens",
    ("POST", "/detokenize"): "Prompt",
}
