"""What `LLM` returns; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.outputs import PositionLogprobs
from pagewire_frontend.answers import ToolCall
from pagewire_frontend.finished import FinishedGeneration, FinishedSequence
from pagewire_frontend.logprobs import token_with_text
from pagewire_frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's raw log probability, its rank (1 = likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a prompt's n answers.

    Attributes:
        index: its number among the n.
        text: the answer.
        token_ids: its tokens, through the one that completed a stop string.
        cumulative_logprob: sum over the tokens; None unless logprobs were asked for, or a search or
            `best_of` compared them.
        logprobs: for each token, the log probabilities by token id: the token's and the likeliest
            alternatives'. None unless asked for.
        finish_reason: "stop", "length", "tool_calls" or "abort".
        stop_reason: the stop string or the stop token id that ended it, if one did.
        reasoning: what the model thought before, of a chat whose answer was taken apart.
        tool_calls: the calls that it made, likewise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds of a prompt's life in the engine.

    Attributes:
        queue_s: until it was scheduled for the first time.
        prefill_s: from there to its first token.
        decode_s: from its first token to its end.
        steps: engine steps that computed something of it.
        step_s: what those steps took.
        preemptions: how often it lost its blocks.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    preemptions: int = 0

    @property
    def time_to_first_token_s(self) -> float:
        """Queue and prefill together."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """All phases together."""
        return self.time_to_first_token_s + self.decode_s


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        request_id: the id it ran under.
        prompt: its text; None where token ids were given.
        prompt_token_ids: its tokens.
        prompt_logprobs: one entry a token of the prompt, None for the first. None unless asked for.
        outputs: the n answers.
        finished: always True.
        metrics: how long the phases of its life took.
        num_cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result of a beam search.

    Attributes:
        tokens: of the prompt and the answer.
        text: of the prompt and the answer.
        cum_logprob: sum over the answer's tokens.
        output: the answer alone.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    output: CompletionOutput

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token of the answer, where asked for."""
        return self.output.logprobs

    @property
    def finish_reason(self) -> str:
        """ "stop" at the end of sequence, "length" at max_tokens."""
        return self.output.finish_reason


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt: `sequences`, best score first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(request: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """From a finished search, whose cumulative log probabilities are always told."""
    prompt = request.prompt
    if prompt is None:
        ids = request.prompt_token_ids
        prompt = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=request.prompt_token_ids + output.token_ids,
                text=prompt + output.text,
                cum_logprob=output.cumulative_logprob or 0.0,
                output=output,
            )
            for output in request.outputs
        ]
    )


def request_output(
    prompt: str | None,
    finished: FinishedGeneration,
    tokenizer: Tokenizer | None,
    *,
    with_logprobs: bool,
    with_prompt_logprobs: bool,
    with_cumulative_logprob: bool = False,
) -> RequestOutput:
    """From a finished generation."""
    times = finished.times
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if with_prompt_logprobs:
        prompt_logprobs = [None, *(_position(p, tokenizer) for p in finished.prompt_logprobs)]
    return RequestOutput(
        request_id=finished.request_id,
        prompt=prompt,
        prompt_token_ids=finished.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[
            _completion(sequence, with_logprobs, with_logprobs or with_cumulative_logprob)
            for sequence in finished.sequences
        ],
        metrics=RequestMetrics(
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            steps=times.steps,
            step_s=times.step_s,
            preemptions=times.preemptions,
        ),
        num_cached_tokens=times.cached_tokens,
    )


def _completion(
    sequence: FinishedSequence, with_logprobs: bool, with_cumulative_logprob: bool
) -> CompletionOutput:
    reason = sequence.finish_reason
    return CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=sequence.token_ids,
        cumulative_logprob=sequence.cumulative_logprob if with_cumulative_logprob else None,
        logprobs=[
            {
                token.token_id: Logprob(token.logprob, token.rank, token.text)
                for token in (*position.top, position.token)
            }
            for position in sequence.logprobs
        ]
        if with_logprobs
        else None,
        finish_reason=reason.name.lower() if reason is not None else "abort",
        stop_reason=sequence.stop_reason,
        reasoning=sequence.reasoning,
        tool_calls=tuple(sequence.tool_calls),
    )


def _position(position: PositionLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    tokens = [token_with_text(tokenizer, token) for token in (*position.top, position.token)]
    return {token.token_id: Logprob(token.logprob, token.rank, token.text) for token in tokens}
