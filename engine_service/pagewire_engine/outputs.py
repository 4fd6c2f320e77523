"""What the engine tells of a request: plain data from the loop to whoever carries it on."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes


@dataclass(slots=True)  # one a token: frozen, it would take four times as long to make
class SequenceOutput:
    """What one sequence produced in one step.

    Attributes:
        request_id: the internal id it was submitted under.
        sequence_index: which of the request's n sequences.
        start: index of the first token below within the sequence's output.
        token_ids: the new tokens.
        logprobs: one entry a token, where asked for.
        finish_reason: set when the sequence ended.
        stop_token_id: the stop token id that ended it, if one did (not end-of-sequence).
        num_tokens: tokens of the sequence's output so far, these included.
        cumulative_logprob: of the output so far; 0 unless logprobs were asked for.
        times: set with the request's first token and with finish_reason.
        vector: what pooling made of the prompt; it comes with finish_reason, and without tokens.
    """

    request_id: str
    sequence_index: int
    start: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    times: RequestTimes | None = None
    vector: list[float] | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsOutput:
    """Log probabilities of prompt positions from `start` (1 or above) on."""

    request_id: str
    start: int
    positions: list[PositionLogprobs]


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The whole request ended with an error."""

    request_id: str
    error: PagewireError


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All that one step has to tell."""

    step: int
    sequences: list[SequenceOutput] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsOutput] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sequences or self.prompt_logprobs or self.failures)
