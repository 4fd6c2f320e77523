"""Which beams go on, which sequences have ended, and when the search is over.

The algorithm is that of Hugging Face transformers (`generate` with num_beams and do_sample=False),
so that its answers are the same: in each step the best continuations of all beams are ranked
together; those that end a sequence are kept if they rank among the first `beam_width`, and the best
`beam_width` of the others go on. Plain data in, plain data out.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagewire.beam_search_params import BeamSettings
from pagewire.outputs import FinishReason, PositionLogprobs, TokenLogprob
from pagewire_engine.step import Candidates


class Beam(Protocol):
    """A sequence that goes on."""

    @property
    def output_token_ids(self) -> list[int]: ...

    @property
    def cumulative_logprob(self) -> float: ...

    @property
    def logprobs(self) -> list[PositionLogprobs]: ...


class Continuation(NamedTuple):
    """A beam and the token that is to follow it.

    Attributes:
        beam: index of the beam.
        rank: of the token among the beam's candidates; 0 is the likeliest.
        token_id: the token.
        cumulative_logprob: of the beam and the token.
        logprobs: what is to be told of the token, where the request asked.
    """

    beam: int
    rank: int
    token_id: int
    cumulative_logprob: float
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that ended.

    Attributes:
        token_ids: its output, the end-of-sequence token included.
        cumulative_logprob: sum over the output.
        score: what results are ranked by.
        finish_reason: STOP at an end-of-sequence token, LENGTH at max_tokens.
        logprobs: one entry a token where the request asked, else empty.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    logprobs: list[PositionLogprobs]


class BeamSearch:
    """One request's search.

    Args:
        settings: width, length penalty, early stopping.
        max_tokens: length at which a sequence ends by itself.
        eos_token_ids: tokens that end a sequence.
        num_logprobs: alternatives to report for each token; None: no log probabilities.

    Attributes:
        length: tokens of every beam that goes on.
        hypotheses: the best sequences that have ended, at most `beam_width`, best score first.
        done: nothing that goes on could change the hypotheses, or is allowed to.
    """

    def __init__(
        self,
        settings: BeamSettings,
        max_tokens: int,
        eos_token_ids: Collection[int],
        num_logprobs: int | None = None,
    ) -> None:
        self.settings = settings
        self.length = 0
        self.hypotheses: list[Hypothesis] = []
        self.done = False
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_candidates = settings.num_candidates(len(self._eos_token_ids))
        self._num_logprobs = num_logprobs

    def advance(
        self, beams: Sequence[Beam], candidates: Sequence[Candidates]
    ) -> list[Continuation]:
        """Takes one step.

        Args:
            beams: those that went on from the last step, or at first one that is empty.
            candidates: for each beam its likeliest next tokens, at least
                `settings.num_candidates(...)` where there are so many.

        Returns:
            The beams that go on, best first; none of any use once `done` is set.
        """
        self.length += 1
        ranked = self._rank(beams, candidates)
        at_limit = self.length >= self._max_tokens
        going_on: list[Continuation] = []
        for place, ranked_one in enumerate(ranked):
            continuation = self._with_logprobs(ranked_one, candidates[ranked_one.beam])
            is_eos = continuation.token_id in self._eos_token_ids
            if not is_eos and not at_limit:
                going_on.append(continuation)
            elif place < self.settings.beam_width:
                # What ends further down was only looked at so that enough beams go on.
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                self._end(beams[continuation.beam], continuation, reason)
        del going_on[self.settings.beam_width :]
        self.done = self._is_done(going_on)
        return going_on

    def _with_logprobs(self, continuation: Continuation, own: Candidates) -> Continuation:
        if self._num_logprobs is None:
            return continuation
        ranked = [
            TokenLogprob(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(own.token_ids, own.logprobs, strict=True), start=1
            )
        ]
        told = PositionLogprobs(ranked[continuation.rank], ranked[: self._num_logprobs])
        return continuation._replace(logprobs=told)

    def _rank(self, beams: Sequence[Beam], candidates: Sequence[Candidates]) -> list[Continuation]:
        of_each_beam = [
            _continuations(index, beam, own)
            for index, (beam, own) in enumerate(zip(beams, candidates, strict=True))
        ]
        # Stable: among equals the better beam, then the likelier token comes first.
        ranked = heapq.merge(*of_each_beam, key=lambda each: -each.cumulative_logprob)
        return list(itertools.islice(ranked, self._num_candidates))

    def _end(self, beam: Beam, last: Continuation, reason: FinishReason) -> None:
        self.hypotheses.append(
            Hypothesis(
                token_ids=[*beam.output_token_ids, last.token_id],
                cumulative_logprob=last.cumulative_logprob,
                score=self._score(last.cumulative_logprob, self.length),
                finish_reason=reason,
                logprobs=[*beam.logprobs, *([last.logprobs] if last.logprobs else [])],
            )
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.settings.beam_width :]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self.settings.length_penalty)

    def _is_done(self, going_on: Sequence[Continuation]) -> bool:
        if not going_on:
            return True
        if len(self.hypotheses) < self.settings.beam_width:
            return False
        if self.settings.early_stopping is True:
            return True
        length = self.length
        if self.settings.early_stopping == "never" and self.settings.length_penalty > 0:
            length = self._max_tokens  # the length that the penalty favours most
        best_possible = self._score(going_on[0].cumulative_logprob, length)
        return best_possible <= self.hypotheses[-1].score


def _continuations(index: int, beam: Beam, own: Candidates) -> Iterator[Continuation]:
    """A beam's, best first, made as far as they are asked for."""
    for rank, (token_id, logprob) in enumerate(zip(own.token_ids, own.logprobs, strict=True)):
        yield Continuation(index, rank, token_id, beam.cumulative_logprob + logprob)
