"""One sequence on its way from tokens to text: detokenised, searched for stop strings, counted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pagewire.outputs import FinishReason, PositionLogprobs
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.detokenizer import Detokenizer, make_detokenizer
from pagewire_frontend.engine_client.base import TokenDelta
from pagewire_frontend.generation_types import PositionTextLogprobs, TextDelta
from pagewire_frontend.logprobs import position_with_text
from pagewire_frontend.stop_strings import StopStrings
from pagewire_frontend.tokenizer import Tokenizer


class SequenceText:
    """The text of one sequence.

    Args:
        index: which of the request's n sequences.
        tokenizer: None where only token ids are served.
        eos_token_ids: the model's.
        shown: control tokens that the text has, whatever `skip_special_tokens` says.

    Attributes:
        finished: nothing more of the sequence is told.
        num_tokens: its tokens so far, through the one that completed a stop string.
        stopped_by_string: a stop string ended it, so the engine has to be told.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_drops_stop_token",
        "_each_token",
        "_index",
        "_min_tokens",
        "_silent_stops",
        "_stop_strings",
        "_text_length",
        "_tokenizer",
        "_withheld",
        "finished",
        "num_tokens",
        "stopped_by_string",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Collection[int],
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                shown=shown,
            )
        self._stop_strings = StopStrings(
            params.stop, include_in_output=params.include_stop_str_in_output
        )
        self._drops_stop_token = not params.include_stop_str_in_output
        # The tokens that have no text where they end the sequence.
        self._silent_stops: frozenset[int] = frozenset()
        if self._drops_stop_token:
            eos = () if params.passes_eos else eos_token_ids
            self._silent_stops = frozenset((*params.stop_token_ids, *eos))
        self._withheld: TokenDelta | None = None
        self._min_tokens = params.min_tokens
        # Several tokens at once are cheaper; but a stop string is to be found at its very token,
        # and a log probability has the place of its token.
        self._each_token = bool(params.stop) or params.logprobs is not None
        self.num_tokens = 0
        self._text_length = 0
        self._cumulative_logprob = 0.0
        self.finished = False
        self.stopped_by_string = False

    @property
    def within_character(self) -> bool:
        """Whether its tokens so far end within a character, or may."""
        return self._detokenizer is not None and self._detokenizer.within_character

    def advance(self, delta: TokenDelta) -> TextDelta:
        """What is new since the last delta."""
        if self._withheld is not None or (
            delta.token_ids and delta.token_ids[-1] in self._silent_stops
        ):
            delta = self._withhold(delta)
        token_ids = delta.token_ids
        if self._each_token:
            text_delta = self._each(delta)
            if self.finished:
                return text_delta
        elif self._detokenizer is None or not token_ids:
            text_delta = TextDelta(self._index, "", token_ids)
        elif self._ends_silently(delta):
            text_delta = TextDelta(self._index, self._detokenizer.feed(token_ids[:-1]), token_ids)
        else:
            text_delta = TextDelta(self._index, self._detokenizer.feed(token_ids), token_ids)
        if not self._each_token:
            self.num_tokens += len(token_ids)
        text_delta.num_tokens = self.num_tokens
        if delta.finish_reason is not None:
            self._finish(text_delta, delta)
        return text_delta

    def _withhold(self, delta: TokenDelta) -> TokenDelta:
        """The delta with the token that was withheld before, and less its last one if that may
        have ended the sequence: only the finish reason, which may come later, tells whether it has
        text."""
        before, self._withheld = self._withheld, None
        if before is not None:
            delta = replace(
                delta,
                start=before.start,
                token_ids=before.token_ids + delta.token_ids,
                logprobs=before.logprobs + delta.logprobs,
            )
        if delta.finish_reason is None and delta.token_ids[-1] in self._silent_stops:
            last = len(delta.token_ids) - 1
            self._withheld = TokenDelta(
                delta.sequence_index,
                delta.start + last,
                delta.token_ids[last:],
                delta.logprobs[last:],
            )
            delta = replace(delta, token_ids=delta.token_ids[:last], logprobs=delta.logprobs[:last])
        return delta

    def _ends_silently(self, delta: TokenDelta) -> bool:
        return delta.finish_reason is FinishReason.STOP and self._drops_stop_token

    def _each(self, delta: TokenDelta) -> TextDelta:
        """Token by token, so that a stop string is found at the token that completes it."""
        detokenizer, stop_strings = self._detokenizer, self._stop_strings
        last = len(delta.token_ids) - 1
        unseen = self._ends_silently(delta)
        pieces: list[str] = []
        logprobs: list[PositionTextLogprobs] = []
        for n, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if n < len(delta.logprobs):
                logprobs.append(self._logprob(delta.logprobs[n]))
            if detokenizer is None or (unseen and n == last):
                continue
            text = detokenizer.feed((token_id,))
            self._text_length += len(text)
            text, stop = stop_strings.feed(text, suspended=self.num_tokens < self._min_tokens)
            pieces.append(text)
            if stop is not None:
                return self._stopped(pieces, delta.token_ids[: n + 1], logprobs, stop)
        return TextDelta(self._index, "".join(pieces), delta.token_ids, logprobs)

    def _logprob(self, position: PositionLogprobs) -> PositionTextLogprobs:
        self._cumulative_logprob += position.token.logprob
        return position_with_text(self._tokenizer, position, self._text_length)

    def _stopped(
        self,
        pieces: list[str],
        token_ids: list[int],
        logprobs: list[PositionTextLogprobs],
        stop: str,
    ) -> TextDelta:
        self.finished = self.stopped_by_string = True
        return TextDelta(
            self._index,
            "".join(pieces),
            token_ids,
            logprobs,
            FinishReason.STOP,
            stop,
            self.num_tokens,
            self._cumulative_logprob,
        )

    def _finish(self, text_delta: TextDelta, delta: TokenDelta) -> None:
        self.finished = True
        text_delta.finish_reason = delta.finish_reason
        text_delta.stop_reason = delta.stop_token_id
        text_delta.cumulative_logprob = delta.cumulative_logprob
        if self._detokenizer is not None:
            text, stop = self._stop_strings.feed(
                self._detokenizer.finish(), suspended=self.num_tokens < self._min_tokens
            )
            if stop is not None:
                text_delta.finish_reason, text_delta.stop_reason = FinishReason.STOP, stop
            text_delta.text += text + self._stop_strings.finish()
