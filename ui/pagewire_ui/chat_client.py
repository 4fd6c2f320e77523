"""A chat over the public gRPC API, as a page wants to show it. Nothing of Gradio here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from pagewire.v1 import inference_pb2, sampling_pb2
from pagewire_ui.frontend_link import FrontendLink

# A page can't draw faster than people see; tokens that come meanwhile are shown together.
_REDRAW_S = 0.04
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the page's controls hold; None leaves the choice to the server.

    Attributes:
        model: an adapter's name; "" is the base model.
        chat_template: a template's name or source, in place of the model's own.
        stop: strings that end the answer.
        logprobs: alternatives to tell of each token.
    """

    system_prompt: str = ""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class ChatProgress:
    """An answer so far.

    Attributes:
        text: all of it, not only what is new.
        reasoning: the model's reasoning, which is no part of the text.
        num_tokens: tokens of the answer.
        num_prompt_tokens, num_cached_tokens: tokens of the conversation it answers, and how many of
            them the prefix cache had; 0 until the end.
        first_token_s: seconds until the first token came; None before.
        elapsed_s: seconds since it was asked for.
        reason: why it ended: "stop", "length", "cancelled" or "error"; "" while it goes on.
        is_over: nothing more comes.
        error: for "error", what to tell the person.
        details: each token with its alternatives, where they were asked for.
    """

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    elapsed_s: float = 0.0
    reason: str = ""
    is_over: bool = False
    error: str = ""
    details: Sequence[inference_pb2.PositionText] = field(default=(), repr=False)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, in tokens per second."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / max(self.elapsed_s - self.first_token_s, 1e-6)


class ChatClient:
    """Asks one frontend. Make it, and use it, in one event loop."""

    def __init__(self, link: FrontendLink) -> None:
        self._link = link

    async def models(self) -> list[inference_pb2.Model] | None:
        """What is served, the base model first; None while the frontend does not serve."""
        request = inference_pb2.ListModelsRequest()
        try:
            answer = await self._link.inference.ListModels(
                request, timeout=_TIMEOUT_S, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return list(answer.models)

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
        call = self._link.inference.Chat(_request(messages, settings), metadata=self._link.metadata)
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
                    progress = _conclude(progress, reader, self._link)
                yield progress
                if not finished:
                    await asyncio.wait([reader], timeout=_REDRAW_S)
        finally:
            # Also where the page was closed and nobody draws any more.
            call.cancel()
            for task in (reader, stopper):
                task.cancel()
            await asyncio.gather(reader, stopper, return_exceptions=True)


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
        model=settings.model,
        messages=chat_messages(turns),
        sampling_params=sampling_pb2.SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            presence_penalty=settings.presence_penalty,
            frequency_penalty=settings.frequency_penalty,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            logprobs=settings.logprobs,
        ),
        text_params=inference_pb2.TextParams(stop=settings.stop),
        template_params=inference_pb2.ChatTemplateParams(chat_template=settings.chat_template),
    )


def chat_messages(turns: Sequence[tuple[str, str]]) -> list[inference_pb2.ChatMessage]:
    """Messages of (role, text) pairs."""
    return [
        inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=text)])
        for role, text in turns
    ]


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
    text, reasoning, details = [progress.text], [progress.reasoning], list(progress.details)
    tokens = progress.num_tokens
    changes: dict[str, Any] = {}
    for message in received:
        for choice in message.choices:
            text.append(choice.content)
            reasoning.append(choice.reasoning_content)
            details.extend(choice.logprobs)
            tokens += len(choice.token_ids)
            if choice.finish_reason in _ENDS:
                changes["reason"] = _ENDS[choice.finish_reason]
        if message.HasField("usage"):
            changes["num_prompt_tokens"] = message.usage.prompt_tokens
            changes["num_cached_tokens"] = message.usage.cached_tokens
            tokens = message.usage.completion_tokens or tokens
    if progress.first_token_s is None and tokens:
        changes["first_token_s"] = elapsed_s
    return replace(
        progress,
        text="".join(text),
        reasoning="".join(reasoning),
        num_tokens=tokens,
        elapsed_s=elapsed_s,
        details=details,
        **changes,
    )


def _conclude(
    progress: ChatProgress, reader: asyncio.Task[None], link: FrontendLink
) -> ChatProgress:
    """The call is over: says how, and what to tell the person if it failed."""
    if reader.cancelled():
        return replace(progress, reason="cancelled", is_over=True)
    failure = reader.exception()
    if isinstance(failure, grpc.aio.AioRpcError):
        if failure.code() == grpc.StatusCode.CANCELLED:
            return replace(progress, reason="cancelled", is_over=True)
        return replace(progress, reason="error", is_over=True, error=link.explain(failure))
    if failure is not None or progress.reason in ("", "error"):
        error = "The server could not finish this answer."
        return replace(progress, reason="error", is_over=True, error=error)
    return replace(progress, is_over=True)
