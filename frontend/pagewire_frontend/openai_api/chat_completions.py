"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagewire_frontend.faults import renaming
from pagewire_frontend.finished import FinishedSequence
from pagewire_frontend.generation_types import GenerationRequest, TextDelta
from pagewire_frontend.metered_generation import MeteredGeneration
from pagewire_frontend.openai_api.body_reading import read_body
from pagewire_frontend.openai_api.chat_request import chat_request
from pagewire_frontend.openai_api.chunks import (
    TOOL_CALLS,
    ChunkFormat,
    metrics_block,
    reasoning_fields,
    usage_block,
)
from pagewire_frontend.openai_api.event_stream import Emit, EventStream, unless_disconnected
from pagewire_frontend.openai_api.legacy_functions import FUNCTION_CALL
from pagewire_frontend.openai_api.logprobs import chat_logprobs
from pagewire_frontend.openai_api.prompt_logprobs import prompt_logprobs
from pagewire_frontend.openai_api.requests import ChatBody
from pagewire_frontend.serving import Serving
from pagewire_frontend.tokenizer import Tokenizer


async def create_chat_completion(serving: Serving, request: Request) -> Response:
    """Answers a conversation.

    Raises:
        PagewireError: the request was refused, or failed before its answer began.
    """
    body = await read_body(request, ChatBody)
    streams = body.streams
    names = {"prompt": "messages", "prompt_token_ids": "messages"} | body.field_names
    with renaming(names):
        generation_request = await chat_request(serving, request, body)
    generation = await serving.start(generation_request, names)
    tokenizer = serving.generation.for_model(generation_request.model).tokenizer_or_none
    reply = _ChatReply(generation, generation_request, body, tokenizer)
    if streams:
        return EventStream(
            [reply.write],
            reply.closing,
            generation.aclose,
            serving.config.sse_keepalive_s,
            serving.shutdown,
        )
    try:
        whole = await unless_disconnected(request.receive, reply.whole())
    finally:
        await generation.aclose()
    return Response(whole, media_type="application/json")


class _ChatReply:
    """One answer, streamed or whole."""

    def __init__(
        self,
        generation: MeteredGeneration,
        request: GenerationRequest,
        body: ChatBody,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_prompt_logprobs = body.prompt_logprobs
        self._generation = generation
        self._num_choices = request.sampling_params.n
        self._with_token_ids = bool(body.return_token_ids)
        self._prompt_token_ids = generation.prompt_token_ids if self._with_token_ids else None
        self._with_logprobs = bool(body.logprobs)
        self._is_plain_text = request.answer is None
        self._calls = FUNCTION_CALL if body.functions else TOOL_CALLS
        self._id = f"chatcmpl-{request.request_id}"
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = body.include_usage
        self._format = ChunkFormat(
            object_name="chat.completion.chunk",
            response_id=self._id,
            created=self._created,
            model=request.model,
            num_choices=self._num_choices,
            include_usage=self._include_usage,
            finish_names=self._calls.finish_names,
        )

    async def write(self, emit: Emit) -> None:
        """The stream's events, but for the closing ones."""
        detailed = self._with_logprobs or self._with_token_ids
        plain = self._is_plain_text and not detailed
        text = self._format.text
        events = [
            self._format.choice(
                index,
                {"role": "assistant", "content": ""},
                prompt_token_ids=self._prompt_token_ids if index == 0 else None,
            )
            for index in range(self._num_choices)
        ]
        async for update in self._generation:
            for delta in update.deltas:
                if plain:
                    if delta.text:
                        events.append(text(delta.index, delta.text))
                elif detailed and (delta.text or delta.token_ids):
                    events.append(self._detailed(delta))
                else:
                    events += self._parts(delta)
                if delta.finish_reason is not None:
                    events.append(
                        self._format.choice(
                            delta.index,
                            {},
                            finish_reason=delta.finish_reason,
                            stop_reason=delta.stop_reason,
                        )
                    )
            if events:
                await emit(b"".join(events))
                events.clear()

    def _parts(self, delta: TextDelta) -> list[bytes]:
        """A chunk for each kind of what the delta has, as OpenAI's own never mix them."""
        index, events = delta.index, []
        if delta.reasoning:
            events.append(self._format.choice(index, reasoning_fields(delta.reasoning)))
        if delta.text:
            events.append(self._format.text(index, delta.text))
        if delta.tool_calls:
            events.append(self._format.choice(index, self._calls.delta(delta.tool_calls)))
        return events

    def _detailed(self, delta: TextDelta) -> bytes:
        """One chunk: log probabilities and ids belong to all that their tokens became."""
        fields: dict[str, Any] = {"content": delta.text}
        if delta.reasoning:
            fields |= reasoning_fields(delta.reasoning)
        if delta.tool_calls:
            fields |= self._calls.delta(delta.tool_calls)
        return self._format.choice(
            delta.index,
            fields,
            logprobs=chat_logprobs(delta.logprobs) if self._with_logprobs else None,
            token_ids=delta.token_ids if self._with_token_ids else None,
        )

    def closing(self) -> bytes:
        """The usage chunk, where it was asked for."""
        return self._format.usage(self._generation.usage())

    async def whole(self) -> bytes:
        """The whole answer's JSON."""
        whole = await self._generation.collect()
        usage = self._generation.usage()
        response: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(sequence) for sequence in whole.sequences],
            "usage": usage_block(usage),
            "metrics": metrics_block(usage),
        }
        if self._num_prompt_logprobs is not None:
            response["prompt_logprobs"] = await prompt_logprobs(
                whole.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer
            )
        if self._with_token_ids:
            response["prompt_token_ids"] = self._prompt_token_ids
        return orjson.dumps(response)

    def _choice(self, sequence: FinishedSequence) -> dict[str, Any]:
        reason = sequence.finish_reason
        message: dict[str, Any] = {
            "role": "assistant",
            "content": sequence.text,
            "refusal": None,
        }
        if sequence.reasoning:
            message |= reasoning_fields(sequence.reasoning)
        if sequence.tool_calls:
            message["content"] = sequence.text or None
            message |= self._calls.whole(sequence.tool_calls)
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": message,
            "logprobs": chat_logprobs(sequence.logprobs) if self._with_logprobs else None,
            "finish_reason": None if reason is None else self._calls.finish_names[reason],
            "stop_reason": sequence.stop_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = sequence.token_ids
        return choice
