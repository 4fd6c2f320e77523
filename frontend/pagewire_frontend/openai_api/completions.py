"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from pagewire.outputs import PositionLogprobs
from pagewire_frontend.faults import renaming
from pagewire_frontend.finished import FinishedSequence
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import COMPLETION_MAX_TOKENS, GenerationRequest, TextDelta
from pagewire_frontend.metered_generation import MeteredGeneration, total_usage
from pagewire_frontend.openai_api.body_reading import LONG_BODY, read_body
from pagewire_frontend.openai_api.chunks import (
    FINISH_NAMES,
    ChunkFormat,
    metrics_block,
    usage_block,
)
from pagewire_frontend.openai_api.echo import Echo
from pagewire_frontend.openai_api.event_stream import (
    Emit,
    EventStream,
    run_all,
    unless_disconnected,
)
from pagewire_frontend.openai_api.logprobs import CompletionLogprobs
from pagewire_frontend.openai_api.prompt_logprobs import prompt_logprobs
from pagewire_frontend.openai_api.requests import CompletionBody
from pagewire_frontend.serving import Serving


async def create_completion(serving: Serving, request: Request) -> Response:
    """Continues one or more prompts.

    Raises:
        PagewireError: the request was refused, or failed before its answer began.
    """
    body = await read_body(request, CompletionBody)
    streams = body.streams
    names = {"prompt_token_ids": "prompt"} | body.field_names
    generation = await serving.generation.find_model(body.model or "")
    make_requests = partial(
        _generation_requests, generation, body, request.state.request_id, request.state.tenant
    )
    with renaming(names):
        if len(await request.body()) > LONG_BODY:
            requests = await asyncio.to_thread(make_requests)
        else:
            requests = make_requests()
    generations = await serving.start_all(requests, names)
    try:
        reply = _CompletionReply(serving, generations, requests, body, request.state.request_id)
        if streams:
            return EventStream(
                reply.writers(),
                reply.closing,
                lambda: serving.close_all(generations),
                serving.config.sse_keepalive_s,
                serving.shutdown,
            )
        whole = await unless_disconnected(request.receive, reply.whole())
    except BaseException:
        await serving.close_all(generations)
        raise
    await serving.close_all(generations)
    return Response(whole, media_type="application/json")


def _generation_requests(
    generation: Generation, body: CompletionBody, request_id: str, tenant: str
) -> list[GenerationRequest]:
    params = body.completion_sampling_params(generation.model_info.default_sampling_params)
    prompts = body.prompts(generation.model_info.max_model_len)
    return [
        GenerationRequest(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
            model=generation.model_name,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling_params=params,
            default_max_tokens=COMPLETION_MAX_TOKENS,
            add_special_tokens=body.add_special_tokens is not False,
            tenant=tenant,
            priority=body.priority or 0,
            prompt_only=body.prompt_only,
        )
        for index, prompt in enumerate(prompts)
    ]


class _CompletionReply:
    """One answer, streamed or whole: n choices for each prompt, prompt by prompt."""

    def __init__(
        self,
        serving: Serving,
        generations: Sequence[MeteredGeneration],
        requests: Sequence[GenerationRequest],
        body: CompletionBody,
        request_id: str,
    ) -> None:
        self._generations = generations
        self._n = requests[0].sampling_params.n
        self._num_logprobs = body.logprobs
        self._num_prompt_logprobs = body.prompt_logprobs
        self._tokenizer = serving.generation.for_model(requests[0].model).tokenizer_or_none
        self._with_token_ids = bool(body.return_token_ids)
        self._echoes: list[Echo | None] = [None] * len(requests)
        if body.echo:
            tokenizer = serving.generation.for_model(requests[0].model).tokenizer
            self._echoes = [
                Echo(tokenizer, request.prompt, generation.prompt_token_ids)
                for request, generation in zip(requests, generations, strict=True)
            ]
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = requests[0].model
        self._format = ChunkFormat(
            object_name="text_completion",
            response_id=self._id,
            created=self._created,
            model=self._model,
            num_choices=self._n * len(requests),
            include_usage=body.include_usage,
        )

    def writers(self) -> list[Any]:
        """One a prompt, for `EventStream`."""

        def writer(position: int) -> Any:
            async def write(emit: Emit) -> None:
                await self._write(position, emit)

            return write

        return [writer(position) for position in range(len(self._generations))]

    async def _write(self, position: int, emit: Emit) -> None:
        echo = self._echoes[position]
        first = position * self._n
        plain = self._num_logprobs is None and not self._with_token_ids
        text = self._format.text
        prompt_positions: list[PositionLogprobs] = []
        events = self._prompt_ids_events(position) if self._with_token_ids else []
        async for update in self._generations[position]:
            prompt_positions.extend(update.prompt_logprobs)
            if echo is not None and update.deltas:
                # The prompt's log probabilities are complete once there is a first token, or an
                # end without any.
                events += [
                    self._echo_event(first + index, echo, prompt_positions)
                    for index in range(self._n)
                ]
                echo = None
            for delta in update.deltas:
                if plain and delta.finish_reason is None:
                    if delta.text:
                        events.append(text(first + delta.index, delta.text))
                elif not plain or delta.finish_reason is not None:
                    events += self._detailed(first, delta, self._echoes[position])
            if events:
                await emit(b"".join(events))
                events = []

    def _prompt_ids_events(self, position: int) -> list[bytes]:
        prompt_token_ids = self._generations[position].prompt_token_ids
        return [
            self._format.choice(
                position * self._n + index, "", token_ids=[], prompt_token_ids=prompt_token_ids
            )
            for index in range(self._n)
        ]

    def _echo_event(self, index: int, echo: Echo, positions: list[PositionLogprobs]) -> bytes:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = CompletionLogprobs(self._num_logprobs)
            echo.fill(logprobs, positions)
        return self._format.choice(
            index,
            echo.text,
            logprobs=None if logprobs is None else logprobs.as_json(),
            token_ids=[] if self._with_token_ids else None,
        )

    def _detailed(self, first: int, delta: TextDelta, echo: Echo | None) -> list[bytes]:
        finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
        if not (delta.text or delta.token_ids or finish_reason is not None):
            return []
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = CompletionLogprobs(self._num_logprobs)
            logprobs.add(delta.logprobs, 0 if echo is None else len(echo.text))
        return [
            self._format.choice(
                first + delta.index,
                delta.text,
                logprobs=None if logprobs is None else logprobs.as_json(),
                token_ids=delta.token_ids if self._with_token_ids else None,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
        ]

    def closing(self) -> bytes:
        """The usage chunk, where it was asked for."""
        return self._format.usage(total_usage(self._generations))

    async def whole(self) -> bytes:
        """The whole answer's JSON."""
        work: list[Awaitable[list[dict[str, Any]]]] = [
            self._choices(position) for position in range(len(self._generations))
        ]
        choices = [choice for group in await run_all(work) for choice in group]
        usage = total_usage(self._generations)
        return orjson.dumps(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": usage_block(usage),
                "metrics": metrics_block(usage),
            }
        )

    async def _choices(self, position: int) -> list[dict[str, Any]]:
        whole = await self._generations[position].collect()
        choices = [
            self._choice(position, sequence, whole.prompt_logprobs) for sequence in whole.sequences
        ]
        if self._num_prompt_logprobs is not None:
            told = await prompt_logprobs(
                whole.prompt_logprobs, self._num_prompt_logprobs, self._tokenizer
            )
            for choice in choices:
                choice["prompt_logprobs"] = told
        return choices

    def _choice(
        self, position: int, sequence: FinishedSequence, prompt_positions: list[PositionLogprobs]
    ) -> dict[str, Any]:
        echo = self._echoes[position]
        prompt_text = "" if echo is None else echo.text
        reason = sequence.finish_reason
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = CompletionLogprobs(self._num_logprobs)
            if echo is not None:
                echo.fill(logprobs, prompt_positions)
            logprobs.add(sequence.logprobs, len(prompt_text))
        choice: dict[str, Any] = {
            "index": position * self._n + sequence.index,
            "text": prompt_text + sequence.text,
            "logprobs": None if logprobs is None else logprobs.as_json(),
            "finish_reason": None if reason is None else FINISH_NAMES[reason],
            "stop_reason": sequence.stop_reason,
        }
        if self._with_token_ids:
            choice["prompt_token_ids"] = self._generations[position].prompt_token_ids
            choice["token_ids"] = sequence.token_ids
        return choice
