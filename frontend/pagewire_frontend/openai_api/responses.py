"""`/v1/responses`: OpenAI's newer API, over chats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.outputs import FinishReason
from pagewire_frontend.faults import renaming
from pagewire_frontend.metered_generation import MeteredGeneration
from pagewire_frontend.openai_api.body_reading import read_body
from pagewire_frontend.openai_api.chat_request import chat_request
from pagewire_frontend.openai_api.chunks import metrics_block
from pagewire_frontend.openai_api.event_stream import Emit, EventStream, unless_disconnected
from pagewire_frontend.openai_api.item_pages import page_of
from pagewire_frontend.openai_api.operations import json_response
from pagewire_frontend.openai_api.response_input import ResponsesBody
from pagewire_frontend.openai_api.response_output import EventWriter, OutputItems
from pagewire_frontend.openai_api.response_store import ResponseStore, StoredResponse
from pagewire_frontend.serving import Serving


class ResponsesApi:
    """The endpoints below /v1/responses.

    Args:
        serving: the engine.
        store: where answers are kept.
    """

    def __init__(self, serving: Serving, store: ResponseStore) -> None:
        self._serving = serving
        self._store = store

    async def create(self, request: Request) -> Response:
        """Answers a conversation.

        Raises:
            PagewireError: the request was refused, or failed before its answer began.
        """
        body = await read_body(request, ResponsesBody)
        tenant = request.state.tenant
        stored = self._store.wanted(body.store)
        earlier: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = self._store.get(tenant, body.previous_response_id, "previous_response_id")
            earlier = [*before.input_items, *before.response["output"]]
        chat = body.chat(earlier)
        names = {"prompt": "messages", "prompt_token_ids": "messages"} | chat.field_names
        with body.in_our_words(), renaming(names):
            generation_request = await chat_request(self._serving, request, chat)
        head = _head(body, generation_request.model, stored)
        _check_depth(head, body.input_items)
        generation = await self._serving.start(
            generation_request,
            {name: body.our_name(theirs) for name, theirs in names.items()}
            | {"max_tokens": "max_output_tokens"},
        )

        def keep(response: dict[str, Any]) -> None:
            if stored:
                items = [*earlier, *body.input_items]
                response["store"] = self._store.add(tenant, StoredResponse(response, items))

        reply = _Reply(generation, head, body, keep)
        if body.stream:
            return EventStream(
                [reply.write],
                lambda: b"",
                generation.aclose,
                self._serving.config.sse_keepalive_s,
                self._serving.shutdown,
                done=b"",
                failed=reply.failed,
            )
        try:
            whole = await unless_disconnected(request.receive, reply.whole())
        finally:
            await generation.aclose()
        return json_response(whole)

    async def get(self, request: Request) -> Response:
        """A kept answer.

        Raises:
            NotFoundError: there is none of this id.
            InvalidArgumentError: it is asked for as a stream.
        """
        for name, neutral in (("stream", "false"), ("starting_after", "")):
            if request.query_params.get(name, neutral).lower() not in (neutral, ""):
                raise InvalidArgumentError(
                    name, "a kept response is whole, and is not streamed again: leave it out"
                )
        return json_response(self._stored(request).response)

    async def input_items(self, request: Request) -> Response:
        """A page of what a kept answer answered.

        Raises:
            NotFoundError: there is no answer of this id.
            InvalidArgumentError: the query asks for a page that there is not.
        """
        return json_response(page_of(self._stored(request).input_items, request.query_params))

    async def delete(self, request: Request) -> Response:
        """Forgets an answer. Raises NotFoundError."""
        response_id = request.path_params["response_id"]
        self._store.delete(request.state.tenant, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.state.tenant, request.path_params["response_id"])


class _Reply:
    """One answer, streamed or whole.

    Args:
        generation: the request, running.
        head: the response's fields that are known from the start.
        body: what was asked.
        keep: called with the whole response.
    """

    def __init__(
        self,
        generation: MeteredGeneration,
        head: dict[str, Any],
        body: ResponsesBody,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._generation = generation
        self._head = head
        self._keep = keep
        self._output = OutputItems(with_logprobs=body.with_logprobs)
        self._events = EventWriter()
        self._unsent: list[bytes] = []

    async def whole(self) -> dict[str, Any]:
        """Reads the answer to its end."""
        async for update in self._generation:
            for delta in update.deltas:
                self._output.advance(delta)
        response = self._finished()
        self._keep(response)
        return response

    async def write(self, emit: Emit) -> None:
        """All of the stream's events."""
        self._unsent = [
            self._events.write(f"response.{name}", {"response": self._begun()})
            for name in ("created", "in_progress")
        ]
        async for update in self._generation:
            for delta in update.deltas:
                self._output.advance(delta)
            told = self._output.take_events()
            if told:
                self._unsent += [self._events.write(*event) for event in told]
                await emit(self._take_unsent())
        response = self._finished()
        self._keep(response)
        await emit(self._last(response))

    def failed(self, error: PagewireError) -> bytes:
        """The last events of a stream that has begun, be it with a comment."""
        return self._last(self._failed(error))

    def _last(self, response: dict[str, Any]) -> bytes:
        ended = self._events.write(f"response.{response['status']}", {"response": response})
        return self._take_unsent() + ended

    def _take_unsent(self) -> bytes:
        """A stream's first events wait for what the model gives: before, it may still fail with a
        status of its own."""
        unsent, self._unsent = self._unsent, []
        return b"".join(unsent)

    def _begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "output": [], "usage": None}

    def _finished(self) -> dict[str, Any]:
        reason = self._output.finish_reason
        usage = self._generation.usage()
        response = {
            **self._head,
            "status": "completed",
            "output": self._output.items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.times.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._output.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            "metrics": metrics_block(usage),
        }
        if reason is FinishReason.LENGTH:
            details = {"reason": "max_output_tokens"}
            return {**response, "status": "incomplete", "incomplete_details": details}
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            error = {"code": "server_error", "message": "the answer was ended before it was whole"}
            return {**response, "status": "failed", "error": error}
        return response

    def _failed(self, error: PagewireError) -> dict[str, Any]:
        told = {"code": error.code.name.lower(), "message": str(error)}
        response = {**self._begun(), "status": "failed", "error": told}
        return {**response, "output": self._output.items}


def _check_depth(head: dict[str, Any], items: list[dict[str, Any]]) -> None:
    """What is sent back was read by a parser that goes deeper than its writer.

    Raises:
        InvalidArgumentError: it could not be written.
    """
    try:
        orjson.dumps([head, items])
    except TypeError:
        raise InvalidArgumentError(
            "input", "it, text, reasoning and tools must be nested less deeply"
        ) from None


def _head(body: ResponsesBody, model: str, stored: bool) -> dict[str, Any]:
    reasoning = body.reasoning or {}
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": stored,
        "temperature": body.temperature,
        "text": {"format": body.text_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
