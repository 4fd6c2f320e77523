"""A generation read to its end: what the unary calls and `LLM` answer with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes
from pagewire_frontend.answers import ToolCall
from pagewire_frontend.generation_types import GenerationUpdate, PositionTextLogprobs


@dataclass(slots=True)
class FinishedSequence:
    """A whole sequence; the fields are those of TextDelta, the calls whole."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionTextLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FinishedGeneration:
    """A whole request: its sequences in index order."""

    request_id: str
    prompt_token_ids: list[int]
    sequences: list[FinishedSequence]
    prompt_logprobs: list[PositionLogprobs]
    times: RequestTimes


class Running(Protocol):
    """What `collect` reads."""

    request_id: str
    prompt_token_ids: list[int]

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]: ...


async def collect(running: Running) -> FinishedGeneration:
    """Reads a request to its end. Raises what it failed with."""
    sequences: dict[int, FinishedSequence] = {}
    texts: dict[int, list[str]] = {}
    reasonings: dict[int, list[str]] = {}
    arguments: dict[tuple[int, int], list[str]] = {}
    prompt_logprobs: list[PositionLogprobs] = []
    times = RequestTimes()
    async for update in running:
        prompt_logprobs += update.prompt_logprobs
        times = update.times or times
        for delta in update.deltas:
            sequence = sequences.setdefault(delta.index, FinishedSequence(delta.index))
            texts.setdefault(delta.index, []).append(delta.text)
            if delta.reasoning:
                reasonings.setdefault(delta.index, []).append(delta.reasoning)
            for call in delta.tool_calls:
                if call.name:
                    sequence.tool_calls.append(ToolCall(call.id, call.name))
                arguments.setdefault((delta.index, call.index), []).append(call.arguments)
            sequence.token_ids += delta.token_ids
            sequence.logprobs += delta.logprobs
            if delta.finish_reason is not None:
                sequence.finish_reason = delta.finish_reason
                sequence.stop_reason = delta.stop_reason
                sequence.cumulative_logprob = delta.cumulative_logprob
    for index, sequence in sequences.items():
        sequence.text = "".join(texts[index])
        sequence.reasoning = "".join(reasonings.get(index, ()))
        for number, whole in enumerate(sequence.tool_calls):
            whole.arguments = "".join(arguments[index, number])
    return FinishedGeneration(
        request_id=running.request_id,
        prompt_token_ids=running.prompt_token_ids,
        sequences=[sequences[index] for index in sorted(sequences)],
        prompt_logprobs=prompt_logprobs,
        times=times,
    )
