"""A chat over the public gRPC API, as a page wants to show it. Nothing of Gradio here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from pagewire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from pagewire_ui.frontend_access import FrontendAccess

# A page can't draw faster than people see; tokens that come meanwhile are shown together.
_REDRAW_S = 0.04
# Around a model's reasoning in the text; the page folds it away.
REASONING_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the page's controls hold; None leaves the choice to the server."""

    system_prompt: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatProgress:
    """An answer so far.

    Attributes:
        text: all of it, not only what is new.
        num_tokens: tokens of the answer.
        num_prompt_tokens: tokens of the conversation it answers; 0 until the end.
        first_token_s: seconds until the first token came; None before.
        elapsed_s: seconds since it was asked for.
        reason: why it ended: "stop", "length", "cancelled" or "error"; "" while it goes on.
        is_over: nothing more comes.
        error: for "error", what to tell the person.
        in_reasoning: the text ends within REASONING_TAGS.
    """

    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    first_token_s: float | None = None
    elapsed_s: float = 0.0
    reason: str = ""
    is_over: bool = False
    error: str = ""
    in_reasoning: bool = False

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, in tokens per second."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(self.elapsed_s - self.first_token_s, 1e-6)


class ChatClient:
    """Asks one frontend. Make it, and use it, in one event loop."""

    def __init__(self, target: str, access: FrontendAccess | None = None) -> None:
        """
        Args:
            target: HOST:PORT of the frontend's gRPC API. It need not be up yet.
            access: key and certificates; None: neither.
        """
        access = access or FrontendAccess()
        self.target = target
        self._metadata = access.metadata
        self._channel = access.channel(target)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def model_name(self) -> str | None:
        """The name of the model that is served; None while the frontend does not serve."""
        try:
            answer = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=3.0, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return answer.models[0].id if answer.models else None

    async def answer(
        self, messages: Sequence[tuple[str, str]], settings: ChatSettings, stop: asyncio.Event
    ) -> AsyncIterator[ChatProgress]:
        """Streams the answer to a conversation.

        Args:
            messages: (role, text) pairs, the oldest first.
            settings: sampling and system prompt.
            stop: when it is set, the call is cancelled, which ends the work on the server too.

        Yields:
            Progress, as often as is worth drawing; the last one has `is_over` set. Never raises
            for what server or network do wrong: that is in `reason` and `error`.
        """
        begun = time.monotonic()
        call = self._stub.Chat(_request(messages, settings), metadata=self._metadata)
        received: list[inference_pb2.ChatResponse] = []
        news = asyncio.Event()
        reader = asyncio.create_task(_read(call, received, news))
        stopper = asyncio.create_task(_cancel_when(stop, call))
        progress, finished = ChatProgress(), False
        try:
            while not finished:
                await news.wait()
                news.clear()
                finished = reader.done()
                progress = _advance(progress, received, time.monotonic() - begun)
                received.clear()
                if finished:
                    progress = _conclude(progress, reader, self.target)
                yield progress
                if not finished:
                    await asyncio.wait([reader], timeout=_REDRAW_S)
        finally:
            # Also where the page was closed and nobody draws any more.
            call.cancel()
            for task in (reader, stopper):
                task.cancel()
            await asyncio.gather(reader, stopper, return_exceptions=True)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


async def _read(
    call: AsyncIterator[inference_pb2.ChatResponse],
    received: list[inference_pb2.ChatResponse],
    news: asyncio.Event,
) -> None:
    try:
        async for message in call:
            received.append(message)
            news.set()
    finally:
        # After this step of the loop, so that the waiter finds the task done.
        asyncio.get_running_loop().call_soon(news.set)


async def _cancel_when(stop: asyncio.Event, call: grpc.aio.Call) -> None:
    await stop.wait()
    call.cancel()


def _request(
    messages: Sequence[tuple[str, str]], settings: ChatSettings
) -> inference_pb2.ChatRequest:
    turns = list(messages)
    if settings.system_prompt.strip():
        turns.insert(0, ("system", settings.system_prompt))
    return inference_pb2.ChatRequest(
        messages=[
            inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=text)])
            for role, text in turns
        ],
        sampling_params=sampling_pb2.SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
        ),
    )


_ENDS = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_TOOL_CALLS: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
    sampling_pb2.FINISH_REASON_ABORT: "cancelled",
    sampling_pb2.FINISH_REASON_ERROR: "error",
}


def _advance(
    progress: ChatProgress, received: Sequence[inference_pb2.ChatResponse], elapsed_s: float
) -> ChatProgress:
    text, reason = [progress.text], progress.reason
    in_reasoning = progress.in_reasoning
    tokens, prompt_tokens = progress.num_tokens, progress.num_prompt_tokens
    for message in received:
        for choice in message.choices:
            if choice.reasoning_content:
                text += ("" if in_reasoning else REASONING_TAGS[0], choice.reasoning_content)
                in_reasoning = True
            if choice.content and in_reasoning:
                text.append(REASONING_TAGS[1])
                in_reasoning = False
            text.append(choice.content)
            tokens += len(choice.token_ids)
            reason = _ENDS.get(choice.finish_reason, reason)
        if message.HasField("usage"):
            prompt_tokens = message.usage.prompt_tokens
            tokens = message.usage.completion_tokens or tokens
    first = progress.first_token_s
    return ChatProgress(
        text="".join(text),
        num_tokens=tokens,
        num_prompt_tokens=prompt_tokens,
        first_token_s=elapsed_s if first is None and tokens else first,
        elapsed_s=elapsed_s,
        reason=reason,
        in_reasoning=in_reasoning,
    )


def _conclude(progress: ChatProgress, reader: asyncio.Task[None], target: str) -> ChatProgress:
    """The call is over: says how, and what to tell the person if it failed."""
    if reader.cancelled():
        return replace(progress, reason="cancelled", is_over=True)
    failure = reader.exception()
    if isinstance(failure, grpc.aio.AioRpcError):
        if failure.code() == grpc.StatusCode.CANCELLED:
            return replace(progress, reason="cancelled", is_over=True)
        error = explain(failure.code(), failure.details() or "", target)
        return replace(progress, reason="error", is_over=True, error=error)
    if failure is not None or progress.reason in ("", "error"):
        error = "The server could not finish this answer."
        return replace(progress, reason="error", is_over=True, error=error)
    return replace(progress, is_over=True)


def explain(code: grpc.StatusCode, details: str, target: str) -> str:
    """An error as a person at the page would want to read it."""
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return (
                f"The model server at {target} can't be reached at the moment. "
                "It may be starting or restarting: try again in a few seconds."
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return "The server is busy with other requests. Try again in a moment."
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "The server took too long to answer. Try again, or ask for a shorter answer."
        case grpc.StatusCode.INVALID_ARGUMENT:
            return f"The server does not accept this request: {details}"
        case grpc.StatusCode.FAILED_PRECONDITION:
            return f"The server is not set up for this: {details}"
        case _:
            return f"Something went wrong on the server ({code.name}): {details}"
