"""A bound on reasoning: where a model would go on, its reasoning is ended for it.

The engine knows nothing of it. A request is its prompt plus the tokens so far: the end of the
reasoning is put there, and the request handed over again to go on from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.answer_format import AnswerFormat
from pagewire_frontend.engine_client.base import PastSequence, TokenDelta
from pagewire_frontend.generation_types import TextDelta
from pagewire_frontend.reasoning import ReasoningParser
from pagewire_frontend.sequence_text import SequenceText

# Tokens beyond the budget that may finish a character which was begun: what is no character would
# be no text, and a constraint takes text alone.
_MOST_FOR_A_CHARACTER = 8


@dataclass(slots=True)
class _Watched:
    """One sequence: what it has produced, whether it still reasons, and whether the end of that
    was written for it, as far as max_tokens had room."""

    parser: ReasoningParser
    end_written: bool = False
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None


class ReasoningBudget:
    """Keeps the sequences of one request within its budget.

    Args:
        answer: with a budget and the format of the reasoning.
        params: n, max_tokens and logprobs are read.

    Attributes:
        spent: a sequence's reasoning was ended; the engine has to be told.
    """

    def __init__(self, answer: AnswerFormat, params: SamplingParams) -> None:
        self._limit = answer.thinking_token_budget or 0
        self._end = list(answer.reasoning_end)
        self._max_tokens = params.max_tokens
        self._with_logprobs = params.logprobs is not None
        self._sequences: list[_Watched] = []
        for _ in range(params.n):
            parser = answer.reasoning_parser()
            assert parser is not None, "a budget needs to know the reasoning's format"
            self._sequences.append(_Watched(parser))
        self.spent = False

    def advance(self, sequence: SequenceText, delta: TokenDelta) -> TextDelta:
        """`sequence.advance`, but the reasoning ends with its budget: what the engine has produced
        beyond it is dropped."""
        watched = self._sequences[delta.sequence_index]
        whole = TextDelta(delta.sequence_index, "", [])
        for piece in self._pieces(watched, delta):
            if self._is_spent(watched, sequence):
                break
            self._take(watched, sequence, piece, whole)
            if sequence.finished:
                return whole
        if self._is_spent(watched, sequence):
            self._write_end(watched, sequence, whole)
        return whole

    def take_past(self) -> tuple[PastSequence, ...]:
        """What all sequences have produced, for the request to go on from."""
        self.spent = False
        return tuple(
            PastSequence(list(one.token_ids), one.finish_reason, one.cumulative_logprob)
            for one in self._sequences
        )

    def _is_spent(self, watched: _Watched, sequence: SequenceText) -> bool:
        if not watched.parser.inside or watched.end_written:
            return False
        beyond = len(watched.token_ids) - self._limit
        return beyond >= (_MOST_FOR_A_CHARACTER if sequence.within_character else 0)

    def _pieces(self, watched: _Watched, delta: TokenDelta) -> Iterator[TokenDelta]:
        """The delta, token by token where the budget may end within it."""
        count = len(delta.token_ids)
        if (
            watched.parser.done
            or watched.end_written
            or len(watched.token_ids) + count < self._limit
            or count < 2
        ):
            yield delta
            return
        for n in range(count - 1):
            yield TokenDelta(
                delta.sequence_index,
                delta.start + n,
                delta.token_ids[n : n + 1],
                delta.logprobs[n : n + 1],
            )
        yield replace(
            delta,
            start=delta.start + count - 1,
            token_ids=delta.token_ids[-1:],
            logprobs=delta.logprobs[-1:],
        )

    def _write_end(self, watched: _Watched, sequence: SequenceText, whole: TextDelta) -> None:
        room = len(self._end)
        if self._max_tokens is not None:
            room = self._max_tokens - len(watched.token_ids)
        end = TokenDelta(whole.index, len(watched.token_ids), self._end[:room])
        if self._with_logprobs:
            # The model had no choice: each position is there, and adds nothing to the sum.
            end.logprobs = [PositionLogprobs(TokenLogprob(t, 0.0, 1), []) for t in end.token_ids]
        self._take(watched, sequence, end, whole)
        watched.end_written = True
        self.spent = self.spent or not sequence.finished

    @staticmethod
    def _take(
        watched: _Watched, sequence: SequenceText, delta: TokenDelta, whole: TextDelta
    ) -> None:
        watched.token_ids += delta.token_ids
        watched.cumulative_logprob += sum(one.token.logprob for one in delta.logprobs)
        text_delta = sequence.advance(delta)
        if not watched.parser.done:
            watched.parser.feed(text_delta.text)
        watched.finish_reason = text_delta.finish_reason
        whole.text += text_delta.text
        whole.token_ids += text_delta.token_ids
        whole.logprobs += text_delta.logprobs
        whole.finish_reason = text_delta.finish_reason
        whole.stop_reason = text_delta.stop_reason
        whole.num_tokens = text_delta.num_tokens
        whole.cumulative_logprob = text_delta.cumulative_logprob
