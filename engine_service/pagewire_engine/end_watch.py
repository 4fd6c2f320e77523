"""Knows a way to the end of an output.

It does from the time on at which that begins to matter: when fewer tokens are left beyond the way
than one token may take, as far as that is known of a schema (`json_schemas.growth`). From then on
it is looked for again when the output has left it, and not while a string goes on that it only has
to close.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pagewire_engine.grammar_endings import GrammarEndings, Tries
from pagewire_engine.json_position import JsonPosition
from pagewire_engine.known_way import rest_after
from pagewire_engine.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Tokens to spare. Below it at the latest the way is followed token by token; before that, where it
# is not known what one token may take, it is looked at again when a quarter of them is spent.
WATCHED = 256
# To spare beside what one token may begin, where that is known: another may begin a little more.
_SLACK = 2
# The way is let go where it matters later than after so many tokens: to find it again takes about
# as long as to follow it for them.
_WORTHWHILE = 8
# A token mostly takes the place of none or some of the way's first.
_MOST_SKIPPED = 3
# Calls of llguidance, of some microseconds each, that may be made where the way is looked for again
# after a token, and in all for a sequence: who needs more is cut.
_TRIES_OF_A_TOKEN = 4096
_TRIES_OF_A_SEQUENCE = 1 << 16
# Tokens of the way that are looked at while a string goes on.
AFTER_STRING = 2
# How long it takes to look again where no way was found that fits, at most, and as a share of what
# there would be to spare beyond the last that was known.
_PAUSE, _PAUSE_SHARE = 32, 8


class Ending(NamedTuple):
    """What is known of a grammar's ends.

    Attributes:
        endings: finds them.
        first: from the beginning to the end; None where none was found.
        growth: tokens by which one may lengthen the way to an end; None where that is not known.
    """

    endings: GrammarEndings
    first: tuple[int, ...] | None
    growth: int | None = None


class _Found(NamedTuple):
    """A way to the end, if there is one, and the tries that it took to find it."""

    way: list[int] | None
    num_tries: int


_NONE_TRIED: Mapping[int, _Found] = MappingProxyType({})


class _Token(NamedTuple):
    """A token with which an output has gone on, or may.

    Attributes:
        id, text: the token, and what the output gets by it.
        in_string: it begins within a string.
        matcher: the sequence's.
        is_taken: `matcher` is after it; else before it.
    """

    id: int
    text: bytes
    in_string: bool
    matcher: LLMatcher
    is_taken: bool

    def leads_to(self, way: list[int]) -> bool:
        """Whether the way can follow on it."""
        return is_way(self.matcher, way if self.is_taken else [self.id, *way])


class EndWatch:
    """Watches one sequence.

    Args:
        ending: of its grammar.
        tokens: the vocabulary's.
        max_tokens: of the sequence's output.
        kept: tokens that are to be left beyond the way whatever a token begins.

    Attributes:
        way: to the end; None while none is needed, or none is known; empty at the end.
        position: in JSON, after the output.
        enough: with more tokens to spare any may come.
    """

    __slots__ = (
        "_endings",
        "_growth",
        "_is_json",
        "_least_depth",
        "_next_look",
        "_num_left",
        "_tokens",
        "_tried",
        "_tries_left",
        "_watched",
        "_way_before",
        "enough",
        "position",
        "way",
    )

    def __init__(self, ending: Ending, tokens: TokenBytes, max_tokens: int, kept: int) -> None:
        self._endings = ending.endings
        self._is_json, self._growth = ending.endings.is_json, ending.growth
        self._tokens = tokens
        self.position = JsonPosition()
        self.way = None if ending.first is None else list(ending.first)
        # The last that was known: much of it is mostly part of the next.
        self._way_before = self.way or []
        # What was found after tokens that may come next.
        self._tried = _NONE_TRIED
        self._tries_left = _TRIES_OF_A_SEQUENCE
        self._num_left = max_tokens
        self.enough = self._watched = WATCHED
        if self._growth is not None:
            self.enough = min(WATCHED, kept + self._growth)
            self._watched = min(WATCHED, self.enough + _SLACK)
        self._plan_next_look()
        self._least_depth = 1  # The way has what ends the whole value.

    def advance(
        self, token_id: int, text: bytes, matcher: LLMatcher, *, in_reasoning: bool
    ) -> None:
        """The sequence has gone on with a token.

        Args:
            token_id: the token.
            text: its bytes, but for those of reasoning.
            matcher: after it.
            in_reasoning: it ends within reasoning.
        """
        self._num_left -= 1
        position = self.position
        was_in_string = position.in_string
        if self._is_json:
            position.read(text)
            if position.depth < self._least_depth:
                self._least_depth = position.depth or 1
        tried, self._tried = self._tried, _NONE_TRIED
        if self._num_left > self._next_look and self._num_left - self._grown() > self._next_look:
            self.way = None
            return
        way = self.way
        if way and way[0] == token_id and len(way) <= self._num_left + 1:
            self.way = way[1:]
            return
        goes_on = was_in_string and position.in_string
        if goes_on and b'"' not in text and self._only_closes(matcher, same_string=True):
            return
        token = _Token(token_id, text, was_in_string, matcher, is_taken=True)
        followed = self._followed(token, self._num_left)
        if followed is not None:
            self.way = followed
            return
        if goes_on and self._only_closes(matcher, same_string=False):
            return
        if matcher.is_stopped():
            self.way = None
            return
        found = tried.get(token_id)
        if found is None or found.num_tries >= self._tries_of_a_token():
            known = self._rejoined(token, self._num_left)
            found = _Found(known, 0) if known else self._look(matcher, in_reasoning=in_reasoning)
        self._tries_left -= found.num_tries
        self.way = found.way
        self._way_before = found.way or self._way_before
        self._plan_next_look()

    def _only_closes(self, matcher: LLMatcher, *, same_string: bool) -> bool:
        """Whether the way begins with the end of a string that goes on, and may still.

        What follows on a string does not depend on its text, but where that decides between
        alternatives. Of the same string that is found out once it matters, as of all that comes
        while no way is known.
        """
        way = self.way
        # A quotation mark after a backslash closes nothing.
        if not way or len(way) > self._num_left or self.position.in_escape:
            return False
        if self._tokens.of[way[0]][:1] != b'"':
            return False
        if same_string and self._num_left - len(way) > self.enough:
            return True
        return is_way(matcher, way[:AFTER_STRING])

    def _followed(self, token: _Token, left: int) -> list[int] | None:
        """What is left of the way after a token that follows it; None after another."""
        rest = rest_after(
            self.way or (),
            token.id,
            token.text,
            self._tokens,
            is_json=self._is_json,
            in_string=token.in_string,
        )
        return rest if rest is not None and len(rest) <= left else None

    def _rejoined(self, token: _Token, left: int) -> list[int] | None:
        """The way, or the rest of it that some tokens are skipped for, if that can follow on a
        token. Much cheaper than another search, which mostly finds the same."""
        way = self.way or []
        for skipped in range(min(_MOST_SKIPPED + 1, len(way))):
            rest = way[skipped:]
            if len(rest) <= left and token.leads_to(rest):
                return rest
        return None

    def _look(self, matcher: LLMatcher, *, in_reasoning: bool) -> _Found:
        """Looks for a way to the end."""
        given = self._tries_of_a_token()
        tries = Tries(given)
        way = self._endings.shortest(
            matcher,
            self.position,
            self._num_left,
            in_reasoning=in_reasoning,
            tries=tries,
            known=self.way or self._way_before,
        )
        return _Found(way, given - tries.left)

    def _tries_of_a_token(self) -> int:
        return min(_TRIES_OF_A_TOKEN, self._tries_left)

    def spare_after(self, token_id: int, matcher: LLMatcher, tries: Tries) -> int | None:
        """Tokens that are left beyond a way to the end after a token that may come; None where none
        is known that fits.

        Args:
            token_id: the token.
            matcher: before it; it is not moved.
            tries: that may be made to find one.
        """
        left = self._num_left - 1
        text = self._tokens.of[token_id]
        token = _Token(token_id, text, self.position.in_string, matcher, is_taken=False)
        # That it could close the same string is not enough: it may decide between alternatives.
        followed = self._followed(token, left)
        if followed is not None:
            return left - len(followed)
        way, num_tries = self._rejoined(token, left), tries.left
        if way is None:
            follower = matcher.deep_copy()
            if not follower.consume_token(token_id):
                return None
            if follower.is_stopped():
                return left
            position = self.position.copy()
            position.read(text)
            known = self.way or self._way_before
            way = self._endings.shortest(follower, position, left, tries=tries, known=known)
        num_tries -= tries.left
        if way is None:
            return None
        # One that stopped for want of tries might have found another with more. In texts that are
        # no JSON half of them are for one kind of search.
        if self._is_json and tries.left > 0:
            self._tried = {**self._tried, token_id: _Found(way, num_tries)}
        return left - len(way)

    def spare(self) -> int | None:
        """Tokens that are left beyond the way; None where no way is known that fits."""
        if self.way is None or len(self.way) > self._num_left:
            return None
        return self._num_left - len(self.way)

    def _plan_next_look(self) -> None:
        """Until so many tokens are left the output goes on unwatched."""
        spare = self.spare()
        self._least_depth = self.position.depth
        if spare is None:
            # Where a way was known it is mostly lost for some tokens only: within a character, or a
            # mark of reasoning. There may be little time left then.
            spare_before = self._num_left - len(self._way_before)
            may_come_back = bool(self._way_before) and spare_before >= 0
            pause = min(_PAUSE, spare_before // _PAUSE_SHARE) if may_come_back else _PAUSE
            self._next_look = self._num_left - max(1, pause)
        elif spare <= self._watched + _WORTHWHILE:
            self._next_look = self._num_left
        elif self._growth is None:
            self._next_look = self._num_left - spare // 4
        else:
            self._next_look = self._num_left - (spare - self._watched)

    def _grown(self) -> int:
        """By how many tokens the way may be longer than it was: by what has been opened since then
        and is open still. One as deep may have been closed before."""
        return (self.position.depth - self._least_depth) * (self._growth or 0)


def is_way(matcher: LLMatcher, token_ids: list[int]) -> bool:
    """Whether all these tokens may follow, one after the other; the matcher is not moved."""
    return matcher.validate_tokens(token_ids) == len(token_ids)
