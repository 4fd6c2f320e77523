"""The streaming calls' inner loop: it runs once a step and stream, so it refills one response
message for each write, and allocates nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from pagewire.v1 import inference_pb2
from pagewire_frontend.generation_types import TextDelta
from pagewire_frontend.grpc_api.responses import (
    MESSAGE_BUDGET,
    fill_choice,
    fill_output,
    fill_usage,
    in_chunks,
    position_text,
    prompt_position,
)
from pagewire_frontend.grpc_api.write_guard import WriteGuard
from pagewire_frontend.metered_generation import MeteredGeneration
from pagewire_frontend.tokenizer import Tokenizer

# At most, in UTF-8 and as a varint.
_BYTES_PER_CHARACTER = 4
_BYTES_PER_ID = 5


class ResponseStream:
    """Writes one call's responses.

    Args:
        guard: writes the call's messages.
        response: with request_id and model set; it is refilled for each write.
        tokenizer: of the prompt; None where only token ids are served.
    """

    __slots__ = ("_guard", "_is_chat", "_outputs", "_prompt_position", "_response", "_write")

    def __init__(
        self,
        guard: WriteGuard,
        response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._is_chat = isinstance(response, inference_pb2.ChatResponse)
        self._response: Any = cast(Any, response)
        self._outputs = self._response.choices if self._is_chat else self._response.outputs
        self._prompt_position = partial(prompt_position, tokenizer)
        self._guard = guard
        self._write = guard.write

    async def write_all(self, generation: MeteredGeneration) -> None:
        """Reads the generation to its end. Prompt logprobs go first, usage comes last.

        Raises:
            ResourceExhaustedError: the client does not read.
        """
        async with self._guard:
            await self._write_all(generation)

    async def _write_all(self, generation: MeteredGeneration) -> None:
        response, outputs = self._response, self._outputs
        has_usage = False
        async for update in generation:
            if update.prompt_logprobs:
                for chunk in in_chunks(update.prompt_logprobs, self._prompt_position):
                    response.prompt_logprobs.extend(chunk)
                    await self._write(response)
                    del response.prompt_logprobs[:]
            size = 0
            for delta in update.deltas:
                if not delta.token_ids and not delta.text and delta.finish_reason is None:
                    continue  # it came with prompt logprobs only
                size += _size_bound(delta)
                if size > MESSAGE_BUDGET:
                    delta = await self._make_room(delta)
                    size = _size_bound(delta)
                logprobs = await self._write_ahead(delta) if delta.logprobs else None
                output = outputs.add()
                fill_output(output, delta)
                if self._is_chat:
                    fill_choice(output, delta)
                else:
                    output.text = delta.text
                if logprobs:
                    output.logprobs.extend(logprobs)
            if update.times is not None:
                fill_usage(response.usage, generation.usage())
                has_usage = True
            if outputs or has_usage:
                await self._write(response)
                del outputs[:]
        if not has_usage:
            fill_usage(response.usage, generation.usage())
            await self._write(response)

    async def _make_room(self, delta: TextDelta) -> TextDelta:
        """Sends what there is, and of a delta that is too long for one message all but its end,
        which it returns. Whole answers come at once from `best_of` and from a beam search."""
        if self._outputs:
            await self._write(self._response)
            del self._outputs[:]
        # Each part of a message gets half of it.
        num_ids = MESSAGE_BUDGET // 2 // _BYTES_PER_ID
        num_characters = MESSAGE_BUDGET // 2 // _BYTES_PER_CHARACTER
        while _size_bound(delta) > MESSAGE_BUDGET:
            output = self._outputs.add(index=delta.index, token_ids=delta.token_ids[:num_ids])
            if self._is_chat:
                output.content = delta.text[:num_characters]
            else:
                output.text = delta.text[:num_characters]
            await self._write(self._response)
            del self._outputs[:]
            delta = replace(
                delta, token_ids=delta.token_ids[num_ids:], text=delta.text[num_characters:]
            )
        return delta

    async def _write_ahead(self, delta: TextDelta) -> list[inference_pb2.PositionText]:
        """Sends what would make one message too long; returns the logprobs that are left."""
        *ahead, last = in_chunks(delta.logprobs, position_text)
        size = sum(position.ByteSize() for position in last)
        if self._outputs and self._response.ByteSize() + size > MESSAGE_BUDGET:
            await self._write(self._response)
            del self._outputs[:]
        for chunk in ahead:
            self._outputs.add(index=delta.index, logprobs=chunk)
            await self._write(self._response)
            del self._outputs[:]
        return last


def _size_bound(delta: TextDelta) -> int:
    """Bytes that text and tokens take in a message, at most."""
    return _BYTES_PER_CHARACTER * len(delta.text) + _BYTES_PER_ID * len(delta.token_ids)
