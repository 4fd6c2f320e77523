"""Requests that an API is to refuse, and what its refusal says."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagewire_frontend.grpc_api.inference import InferenceServicer
from pagewire_frontend.serving import Serving

# No vocabulary is so large.
OUTSIDE = 1_000_000


class Context:
    """A call's context that remembers how the call was ended."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.status = status_pb2.Status()

    def invocation_metadata(self) -> tuple[()]:
        """None came with the call."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.code = code
        self.status.ParseFromString(dict(trailing_metadata)["grpc-status-details-bin"])
        assert self.status.message == details
        raise grpc.aio.AbortError

    def violations(self) -> list[str]:
        """The fields that google.rpc.BadRequest names."""
        fields = []
        for detail in self.status.details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request):
                fields += [violation.field for violation in bad_request.field_violations]
        return fields


async def refused(serving: Serving, method: str, request: Any) -> Context:
    """The context of a call that must have been aborted."""
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await getattr(InferenceServicer(serving), method)(request, context)
    return context


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    # json.dumps writes NaN and Infinity as Python clients do.
    return await http.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )


async def chat(http: httpx.AsyncClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await post(http, "/v1/chat/completions", **{"messages": messages, **body})


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, whose shape is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)
