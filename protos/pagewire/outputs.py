"""What is told of produced tokens, in the engine and in the frontend alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class FinishReason(IntEnum):
    """Why a sequence ended; the numbers are those of pagewire.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    TOOL_CALLS = 5


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its raw log probability, and its rank (1 = likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position, and the likeliest alternatives there in falling order."""

    token: TokenLogprob
    top: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds and counts of one request's life in the engine.

    Attributes:
        queue_s: from its arrival until it was scheduled for the first time.
        prefill_s: from there to its first token.
        decode_s: from its first token to its end.
        cached_tokens: prompt tokens that the prefix cache held.
        preemptions: how often it lost its blocks.
        steps: engine steps that computed something of it.
        step_s: seconds that those steps took.
        resumptions: how often it went on in another engine, or in another life of its own; the rest
            is what the last of them tells.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    resumptions: int = 0
