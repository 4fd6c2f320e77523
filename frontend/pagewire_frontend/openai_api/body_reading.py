"""From the bytes of a request to its checked body, without holding up the other streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar, get_args

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_count,
)
from pagewire.structured_output import MAX_CHOICES
from pagewire_frontend.chat_messages import MAX_MESSAGES, MAX_TOOLS
from pagewire_frontend.generation_types import MAX_PROMPTS
from pagewire_frontend.openai_api.unsupported import refuse_unsupported

# Looking at each of many items would hold up all streams: these are counted first.
_MOST_ITEMS = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "functions": MAX_TOOLS,
    "documents": MAX_PROMPTS,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIASES,
    "guided_choice": MAX_CHOICES,
}
# Values of any kind, by the commas and brackets in a body, those in its texts too: a text with so
# many has more tokens than any model reads. To parse more holds up all streams for seconds.
_MOST_COMMAS = 1_200_000
_MOST_BRACKETS = 300_000
# Checking a body of more bytes than this takes a thread.
LONG_BODY = 64_000
_EXPECTATION = "Input should be "  # Pydantic's

BodyT = TypeVar("BodyT", bound=BaseModel)


async def read_body(request: Request, body_class: type[BodyT]) -> BodyT:
    """The request's JSON body, checked.

    Raises:
        InvalidArgumentError: it is not JSON, or a field is wrong or not served.
        RequestTooLargeError: it is too long.
    """
    media_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    # Not a formality: browsers let any page post text/plain here, but not application/json.
    if media_type != "application/json":
        raise InvalidArgumentError("", "send the header `Content-Type: application/json`")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidArgumentError(
            "", f"the body's Content-Encoding is {encoding!r:.40}; send it as it is, without one"
        )
    try:
        content = await request.body()
    except ClientDisconnect:
        raise InvalidArgumentError("", "the client left in the middle of its body") from None
    if len(content) > LONG_BODY:
        return await asyncio.to_thread(_checked, content, body_class)
    return _checked(content, body_class)


def _checked(content: bytes, body_class: type[BodyT]) -> BodyT:
    if (
        content.count(b",") > _MOST_COMMAS
        or content.count(b"[") + content.count(b"{") > _MOST_BRACKETS
    ):
        raise InvalidArgumentError("", "the body holds more values than any request can use")
    data = _parse_json(content)
    if not isinstance(data, dict):
        raise InvalidArgumentError("", "the body must be a JSON object")
    return validated(data, body_class)


def validated(data: dict[str, Any], body_class: type[BodyT]) -> BodyT:
    """The body that a JSON object makes.

    Raises:
        InvalidArgumentError: a field is wrong or not served.
    """
    most_items = _MOST_ITEMS | getattr(body_class, "most_items", {})
    for name, most in most_items.items():
        if isinstance(value := data.get(name), list | dict):
            check_count(name, value, most)
    refuse_unsupported(data, getattr(body_class, "refused", {}))
    try:
        return body_class.model_validate(data)
    except ValidationError as error:
        raise _describe(error, body_class) from None


def _parse_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        first_error = str(error)
    # Python's own parser takes NaN, which Python clients write, and integers of any length: those
    # are refused further on by the name of their field.
    try:
        data = json.loads(body)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            "", "the body has half of a surrogate pair in a string"
        ) from None
    except (ValueError, RecursionError):
        raise InvalidArgumentError("", f"the body is not valid JSON: {first_error}") from None
    return data


def _describe(error: ValidationError, body_class: type[BaseModel]) -> InvalidArgumentError:
    """The first thing that is wrong. Values are left out: they may be the prompt."""
    detail = _one_of_kinds(error.errors(include_url=False, include_context=False), body_class)
    path = _path(detail["loc"], body_class)
    if detail["type"] == "missing":
        return InvalidArgumentError(path, "is required")
    if detail["type"] == "int_type" and _was_too_large(detail["input"]):
        return InvalidArgumentError(path, "must fit in 64 bits")
    message = detail["msg"].removeprefix("Value error, ")
    return InvalidArgumentError(path, message[:1].lower() + message[1:])


def _one_of_kinds(details: list[ErrorDetails], body_class: type[BaseModel]) -> ErrorDetails:
    """The first error. Of a field that may be of several kinds there is one for each: then the one
    found furthest within the value, as it is of that kind, or else all of them in one."""
    first = details[0]
    if len(first["loc"]) < 2 or not isinstance(first["loc"][1], str):
        return first
    field = body_class.model_fields.get(str(first["loc"][0]))
    if field is None or _has_fields(field.annotation):
        return first
    same = [detail for detail in details if detail["loc"][0] == first["loc"][0]]
    furthest = max(same, key=lambda detail: len(detail["loc"]))
    if len(furthest["loc"]) > len(first["loc"]):
        return furthest
    if all(detail["msg"].startswith(_EXPECTATION) for detail in same):
        kinds = dict.fromkeys(detail["msg"].removeprefix(_EXPECTATION) for detail in same)
        first["msg"] = _EXPECTATION + " or ".join(kinds)
    return first


def _has_fields(annotation: Any) -> bool:
    return any(
        isinstance(kind, type) and issubclass(kind, BaseModel) for kind in get_args(annotation)
    )


def _path(place: tuple[int | str, ...], body_class: type[BaseModel]) -> str:
    """What a client calls a place. Pydantic's has the types of unions too, and keys."""
    if not place:
        return ""
    path = str(place[0])
    field = body_class.model_fields.get(path)
    has_fields = field is not None and _has_fields(field.annotation)
    for part in place[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif has_fields:
            path += f".{part}"
    return path


def _was_too_large(value: Any) -> bool:
    # orjson makes a float of an integer that 64 bits don't hold.
    return isinstance(value, float) and value.is_integer() and abs(value) >= 2**63
