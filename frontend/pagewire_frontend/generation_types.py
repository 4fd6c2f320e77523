"""What the public APIs hand to `generation` and get back from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewire.outputs import FinishReason, PositionLogprobs, RequestTimes
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.answers import ToolCallDelta

if TYPE_CHECKING:
    from pagewire_frontend.answer_format import AnswerFormat

# Prompts, texts or documents of one request over the wires, as many as OpenAI takes.
MAX_PROMPTS = 2048
# What a completion may produce when nobody says; a chat may use the rest of the context.
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to go on from: text or token ids, one of them.

    Attributes:
        request_id: the client's id; "" and one is made.
        model: the name the client asked for; "" is the base model.
        prompt: text, or None.
        prompt_token_ids: token ids, or None.
        sampling_params: resolved over the model's defaults. `max_tokens` None: the rest of the
            context.
        default_max_tokens: stands for `max_tokens` None, as far as the context has room. None: the
            rest of the context.
        add_special_tokens: let the tokenizer add its BOS to a text prompt. A rendered chat
            template must not.
        tenant: whose fair share it counts on.
        priority: lower runs first.
        text_version: of the adapter's own tokenizer and template, where they made the prompt (see
            Generation.text_version); None: the prompt does not depend on them.
        answer: how the text is taken apart; None: it is passed on as it is.
        prompt_only: nothing is to be produced. With `max_tokens` 0 so it is anyway.
        whole: its updates are read for the end alone: see EngineRequest.
    """

    request_id: str = ""
    model: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    default_max_tokens: int | None = None
    add_special_tokens: bool = True
    tenant: str = ""
    priority: int = 0
    text_version: str | None = None
    answer: AnswerFormat | None = None
    prompt_only: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token's log probability with its text and bytes."""

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionTextLogprobs:
    """One position: the token there, and its likeliest alternatives in falling order."""

    token: TextLogprob
    top: list[TextLogprob]
    text_offset: int


@dataclass(slots=True)
class TextDelta:
    """What is new of one sequence. Concatenated, the texts are the sequence's final text.

    Attributes:
        index: which of the request's n sequences.
        text: new text; "" while characters or a possible stop string are incomplete. Of a chat
            whose answer is taken apart it is the content.
        token_ids: new tokens.
        logprobs: one entry a token, where asked for.
        finish_reason: set when the sequence ended; nothing of it follows.
        stop_reason: the stop string or the stop token id that ended it, if one did.
        num_tokens: tokens of the sequence so far; usage counts through the token that completed a
            stop string.
        cumulative_logprob: set with finish_reason.
        reasoning: new text of the model's reasoning.
        tool_calls: what is new of the calls, one entry a call.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionTextLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0
    cumulative_logprob: float = 0.0
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


@dataclass(slots=True)
class GenerationUpdate:
    """What one turn of a stream tells.

    Attributes:
        deltas: one a sequence that has something new.
        prompt_logprobs: token-level, positions 1 and up, with the first update that has any.
        times: set in the last update.
        discarded_tokens: of candidates that `best_of` left out; usage counts them. Set in the last
            update.
    """

    deltas: list[TextDelta]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    times: RequestTimes | None = None
    discarded_tokens: int = 0
