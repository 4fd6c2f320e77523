"""What generation tells, as response messages. The streaming path runs once a step and stream: it
allocates nothing that it need not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from pagewire.conversion import fill_times
from pagewire.outputs import PositionLogprobs
from pagewire.v1 import inference_pb2
from pagewire_frontend.answers import ToolCall, ToolCallDelta
from pagewire_frontend.finished import FinishedSequence
from pagewire_frontend.generation_types import PositionTextLogprobs, TextDelta, TextLogprob
from pagewire_frontend.logprobs import position_with_text
from pagewire_frontend.metered_generation import Usage
from pagewire_frontend.tokenizer import Tokenizer

# Clients refuse messages above 4 MB unless told otherwise.
MESSAGE_BUDGET = 2 << 20

PositionT = TypeVar("PositionT")
MessageT = TypeVar("MessageT", bound=Message)


def fill_usage(message: inference_pb2.Usage, usage: Usage) -> None:
    """Counts and times into a response's `usage`."""
    message.prompt_tokens = usage.prompt_tokens
    message.completion_tokens = usage.completion_tokens
    message.time_to_first_token_s = usage.first_token_s
    message.total_s = usage.total_s
    message.resumptions = usage.times.resumptions
    fill_times(message, usage.times)


def fill_output(
    output: inference_pb2.SequenceOutput | inference_pb2.ChatChoice,
    delta: TextDelta | FinishedSequence,
) -> None:
    """All of a delta but its text and logprobs, whose homes differ."""
    if delta.index:
        output.index = delta.index
    output.token_ids.extend(delta.token_ids)
    if delta.finish_reason is not None:
        # Our numbers are the enum's; mypy-protobuf's ValueType only exists for type checkers.
        output.finish_reason = int(delta.finish_reason)  # type: ignore[assignment]  # stubs want the enum
        if isinstance(delta.stop_reason, str):
            output.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            output.stop_token_id = delta.stop_reason


def fill_choice(choice: inference_pb2.ChatChoice, delta: TextDelta | FinishedSequence) -> None:
    """What a chat's answer was taken apart into."""
    choice.content = delta.text
    if delta.reasoning:
        choice.reasoning_content = delta.reasoning
    calls: Sequence[ToolCall | ToolCallDelta] = delta.tool_calls
    for number, call in enumerate(calls):
        index = call.index if isinstance(call, ToolCallDelta) else number
        choice.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments, index=index)


def position_text(position: PositionTextLogprobs) -> inference_pb2.PositionText:
    """One position's log probabilities with texts."""
    return inference_pb2.PositionText(
        token=_token_text(position.token), top=[_token_text(token) for token in position.top]
    )


def _token_text(token: TextLogprob) -> inference_pb2.TokenText:
    return inference_pb2.TokenText(
        token_id=token.token_id,
        logprob=token.logprob,
        rank=token.rank,
        text=token.text,
        bytes=token.bytes,
    )


def prompt_position(
    tokenizer: Tokenizer | None, position: PositionLogprobs
) -> inference_pb2.PositionText:
    """One prompt position's log probabilities with texts.

    Args:
        tokenizer: of the prompt; None where only token ids are served.
    """
    return position_text(position_with_text(tokenizer, position, 0))


def in_chunks(
    positions: Iterable[PositionT], convert: Callable[[PositionT], MessageT]
) -> Iterator[list[MessageT]]:
    """The positions' messages, in runs that each fit a response."""
    chunk: list[MessageT] = []
    size = 0
    for position in positions:
        message = convert(position)
        length = message.ByteSize() + 4
        if chunk and size + length > MESSAGE_BUDGET:
            yield chunk
            chunk, size = [], 0
        chunk.append(message)
        size += length
    if chunk:
        yield chunk
