"""A sequence's place in the grammar that its output is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewire_engine.end_watch import Ending
from pagewire_engine.reasoning_span import ReasoningMarks, ReasoningSpan
from pagewire_engine.token_bytes import Bits, TokenBytes
from pagewire_engine.unique_items import UniqueItems
from pagewire_engine.wind_down import WindDown

if TYPE_CHECKING:
    # Loaded with the first constraint: most engines never see one.
    from llguidance import LLMatcher

_MOST_SLOW_MASKS = 8


class Matcher:
    """A sequence's place in its grammar. Faults do not raise: they are asked for once a mask has
    been filled.

    Args:
        inner: llguidance's, before the first token.
        tokens: the vocabulary's tokens.
        unique_items: watches that items differ; None where they need not.
        wind_down: brings the output to its end; None where it need not come to one.
        reasoning: finds what comes before the answer; None where nothing does.

    Attributes:
        inner: see above.
    """

    __slots__ = (
        "_is_stuck",
        "_num_slow_masks",
        "_reasoning",
        "_tokens",
        "_unique_items",
        "_wind_down",
        "inner",
    )

    def __init__(
        self,
        inner: LLMatcher,
        tokens: TokenBytes,
        unique_items: UniqueItems | None = None,
        wind_down: WindDown | None = None,
        reasoning: ReasoningSpan | None = None,
    ) -> None:
        self.inner = inner
        self._tokens = tokens
        self._reasoning = reasoning
        self._unique_items = unique_items
        self._wind_down = wind_down
        self._num_slow_masks = 0
        self._is_stuck = False

    @property
    def is_free(self) -> bool:
        """The grammar's mask is all that there is to say: `only_token` and `restrict` need not be
        asked."""
        wind_down = self._wind_down
        return self._unique_items is None and (wind_down is None or not wind_down.watch.way)

    def only_token(self) -> int | None:
        """The token that has to come where its end does not allow any other; None where others may,
        as far as is known without a mask."""
        if self._wind_down is None or self._unique_items is not None or self.inner.is_error():
            return None
        in_reasoning = self._reasoning is not None and self._reasoning.inside
        return self._wind_down.only_token(self.inner, in_reasoning=in_reasoning)

    def restrict(self, bits: Bits) -> None:
        """Takes out of what the grammar allows what it can't tell of."""
        if self.inner.is_error():
            return
        in_reasoning = self._reasoning is not None and self._reasoning.inside
        if self._unique_items is not None and not in_reasoning:
            self._unique_items.restrict(bits, self.inner)
            self._is_stuck = not bits.any()
        if self._wind_down is not None:
            self._wind_down.restrict(bits, self.inner, in_reasoning=in_reasoning)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The sequence has gone on with these tokens."""
        for token_id in token_ids:
            self.inner.consume_token(token_id)
            self.follow(token_id)

    def notice_slow_mask(self) -> None:
        """A mask of it has taken long. Many that do are a fault."""
        self._num_slow_masks += 1

    def follow(self, token_id: int) -> None:
        """Takes notice of a token that `inner` has consumed. To be called after each."""
        if self._wind_down is None and self._unique_items is None:
            return
        text, in_reasoning = self._tokens.of[token_id], False
        if self._reasoning is not None:
            text = self._reasoning.read(token_id, text)
            in_reasoning = self._reasoning.inside
        if self._unique_items is not None:
            self._unique_items.read(text)
        if self._wind_down is not None:
            self._wind_down.watch.advance(token_id, text, self.inner, in_reasoning=in_reasoning)

    def fault(self) -> str | None:
        """Why the sequence can't go on under its grammar; None if it can."""
        if self.inner.is_stopped():  # at its end, or by an error
            if self.inner.is_error():
                from pagewire_engine.grammars import reason

                return f"the output can't be kept to it: {reason(self.inner.get_error())}"
            if not self.inner.is_accepting():
                return "it allows nothing that could follow on what has been produced"
        if self._is_stuck:
            return "the items of an array have to differ, and no other can follow"
        if self._num_slow_masks > _MOST_SLOW_MASKS:
            return (
                "each token takes too long: its texts are too long, or it is too ambiguous; "
                "shorten or simplify it"
            )
        return None


class CompiledGrammar:
    """A grammar, and the matcher before the first token. Whoever holds it keeps it known.

    Args:
        inner: the matcher, to be copied.
        tokens: the vocabulary's tokens.
        num_bytes: about the memory that it takes.
        unique_items: watches that items differ, before the first token; None where they need not.
        ending: how outputs come to an end.
        reasoning: what marks reasoning before the answer; None where there is none.

    Attributes:
        inner, num_bytes: see above.
    """

    __slots__ = (
        "__weakref__",
        "_ending",
        "_reasoning",
        "_tokens",
        "_unique_items",
        "inner",
        "num_bytes",
    )

    def __init__(
        self,
        inner: LLMatcher,
        tokens: TokenBytes,
        *,
        num_bytes: int = 0,
        unique_items: UniqueItems | None = None,
        ending: Ending,
        reasoning: ReasoningMarks | None = None,
    ) -> None:
        self.inner = inner
        self.num_bytes = num_bytes
        self._tokens = tokens
        self._unique_items = unique_items
        self._ending = ending
        self._reasoning = reasoning

    def matcher(self, max_tokens: int | None = None) -> Matcher:
        """A matcher of its own, before the first token.

        Args:
            max_tokens: within which the output has to come to its end; None: it need not.
        """
        unique = self._unique_items
        wind_down = None
        if max_tokens is not None:
            wind_down = WindDown(self._ending, self._tokens, max_tokens)
        span = None if self._reasoning is None else ReasoningSpan(self._reasoning)
        inner = self.inner.deep_copy()
        return Matcher(inner, self._tokens, unique and unique.copy(), wind_down, span)
