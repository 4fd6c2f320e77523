"""Arrays whose items have to differ (`uniqueItems`), which no grammar can say.

What has been produced is read as JSON, byte by byte, and a token that would end an item which the
array has already is taken out of the mask. So is one after which nothing else could follow: where
the rest of such an item is all that the grammar allows.

Like a matcher this is a function of the sequence's tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pagewire_engine.item_reader import Frame, ItemReader, Reading, frames, key_of
from pagewire_engine.json_schemas.places import Place
from pagewire_engine.token_bytes import Bits, TokenBytes, numbers_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BACKSLASH = b"\\"[0]
# How far a dead end is foreseen, in bytes of the item; how many masks a step may take for that;
# and how many ways on are more than could all be dead ends.
_MOST_BYTES_AHEAD = 96
_MOST_FORESEEN = 40
_MOST_WAYS = 32
_MOST_ALLOWED = 2048


class UniqueItems:
    """Watches one sequence.

    Args:
        root: the place of the whole value.
        tokens: the vocabulary's.
    """

    __slots__ = ("_left_last", "_reader", "_tokens")

    def __init__(self, root: Place, tokens: TokenBytes) -> None:
        self._tokens = tokens
        # What `_left` found last, and for what.
        self._left_last: tuple[Place, frozenset[str] | None, list[str]] | None = None
        self._reader = ItemReader(root)

    def copy(self) -> UniqueItems:
        """One like this, for another sequence."""
        other = UniqueItems(self._reader.reading.root, self._tokens)
        other._reader = self._reader.copy()
        return other

    def read(self, text: bytes) -> None:
        """The answer has gone on with these bytes."""
        self._reader.read(text)

    def restrict(self, bits: Bits, matcher: LLMatcher) -> None:
        """Takes tokens out of a mask after which items would be the same.

        Args:
            bits: uint32 [ceil(vocab_size / 32)], what the matcher allows next.
            matcher: the sequence's, for a look at what would follow; it is not moved.
        """
        reading = self._reader.reading
        budget = [_MOST_FORESEEN]
        # Tokens that differ in white space only lead to the same place, and so do those that end a
        # free text alike, as far as the items that may follow are not that very text.
        foreseen: dict[tuple[bytes, bool, bool], bool] = {}
        is_free = reading.in_string and _count(bits) > _MOST_ALLOWED
        for token_id, after in self._dangerous(reading, b"", bits):
            stays = after is not None
            token = self._tokens.of[token_id]
            if after is not None and self._repeats(after, token):
                end = token.find(b'"') if is_free and _BACKSLASH not in token else 0
                place = (token[max(end, 0) :].strip(), after.in_string, end > 0)
                if place not in foreseen:
                    foreseen[place] = self._can_go_on(after, token, token_id, matcher, budget)
                stays = foreseen[place]
            if not stays:
                self._forbid(token_id, reading, bits)

    def _forbid(self, token_id: int, reading: Reading, bits: Bits) -> None:
        """Takes a token out of a mask. White space stands for all that there is."""
        if not reading.in_string and self._tokens.of[token_id].isspace():
            bits &= ~self._tokens.spaces
        else:
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    # -- what a token does ---------------------------------------------------------------------

    def _dangerous(
        self, reading: Reading, ahead: bytes, bits: Bits
    ) -> Iterator[tuple[int, Reading | None]]:
        """The allowed tokens that may end an item or lead to a dead end, and what is read then:
        None where items would be the same."""
        for token_id in self._candidates(reading, ahead, bits):
            token = self._tokens.of[token_id]
            after = self._reader.after(reading, ahead, token)
            if after is not None and not self._has_choice(after, ahead + token):
                after = None
            yield token_id, after

    def _candidates(self, reading: Reading, ahead: bytes, bits: Bits) -> list[int]:
        tokens, frame = self._tokens, reading.frame
        # Within a string nothing ends before its quotation mark.
        several = tokens.several_items if reading.in_string else tokens.several
        found = set(numbers_of(bits & several))
        at_item = frame is not None and frame.keys is not None
        limited = at_item and frame is not None and frame.place.items is not None
        watched = [each for each in frames(frame) if each.keys]
        if not watched and not limited:
            return sorted(found)
        if not reading.in_string:
            # All white space leads to the same place.
            found.update(numbers_of(bits & tokens.spaces)[:1])
            bits = bits & ~tokens.spaces
        if limited:
            return sorted(found | set(numbers_of(bits)[:_MOST_ALLOWED]))
        if not reading.in_string:
            # What begins a string ends no item: it matters where an item begins like that.
            found.update(numbers_of(bits & ~tokens.string_beginnings)[:_MOST_ALLOWED])
        elif not at_item:
            found.update(numbers_of(bits & tokens.quotes & tokens.closers))
        else:
            found.update(self._ends_of_repeats(reading, ahead, bits))
        # Tokens that go on as an item does that is there already.
        for each in watched:
            so_far = self._reader.item_so_far(reading, each, ahead)
            for text in each.texts:
                rest = text[len(so_far) :] if text.startswith(so_far) else b""
                for length in range(1, min(len(rest), 32) + 1):
                    for token_id in tokens.by_bytes.get(rest[:length], ()):
                        if bits[token_id // 32] >> np.uint32(token_id % 32) & 1:
                            found.add(token_id)
        return sorted(found)

    def _ends_of_repeats(self, reading: Reading, ahead: bytes, bits: Bits) -> list[int]:
        """Allowed tokens that may end the string that is being read, an item itself, as one that is
        there."""
        assert reading.frame is not None
        tokens = self._tokens
        try:
            so_far = json.loads(self._reader.since(reading.start, ahead) + b'"')
        except ValueError:  # within an escape, or a character
            return numbers_of(bits & tokens.quotes)
        beginning = json.dumps(so_far)[:-1]
        found: list[int] = []
        alike = False
        for key in reading.frame.keys or ():
            if key.startswith(beginning):
                alike = True
                rest = json.loads(f'"{key[len(beginning) :]}').encode(errors="surrogatepass")
                found += tokens.beginning_with(rest + b'"')
        if alike:
            found += numbers_of(bits & tokens.escaped_ends)
        return [n for n in found if bits[n // 32] >> np.uint32(n % 32) & 1]

    def _has_choice(self, reading: Reading, ahead: bytes) -> bool:
        """Whether a value is left for the item that is begun, of those that it may have."""
        frame = reading.frame
        if frame is None or frame.keys is None or frame.place.items is None:
            return True
        left = self._left(frame)
        if not (reading.in_string or reading.in_plain):
            last = self._reader.since(reading.start - 1, ahead).rstrip()
            return bool(left) or last != b","
        so_far = self._reader.since(reading.start, ahead).decode(errors="ignore")
        return any(text.startswith(so_far) for text in left)

    def _left(self, frame: Frame) -> list[str]:
        """The texts of the values that the array does not have yet, of the few that it may."""
        last = self._left_last
        if last is None or last[0] is not frame.place or last[1] is not frame.keys:
            keys = frame.keys or frozenset()
            left = [text for text, key in frame.place.items or () if key not in keys]
            last = self._left_last = (frame.place, frame.keys, left)
        return last[2]

    def _repeats(self, reading: Reading, ahead: bytes) -> bool:
        """Whether an item goes on as one does that is there, and is near its end."""
        for frame in frames(reading.frame):
            if frame.keys:
                so_far = self._reader.item_so_far(reading, frame, ahead)
                if reading.in_plain and frame is reading.frame and key_of(so_far) in frame.keys:
                    return True
                if (
                    not so_far
                    and frame is reading.frame
                    and self._reader.since(reading.start - 1, ahead)[:1] == b","
                ):
                    return True
                if so_far and any(
                    text.startswith(so_far) and len(text) - len(so_far) < _MOST_BYTES_AHEAD
                    for text in frame.texts
                ):
                    return True
        return False

    def _can_go_on(
        self, reading: Reading, ahead: bytes, token_id: int, matcher: LLMatcher, budget: list[int]
    ) -> bool:
        """Whether the token leads somewhere, as far as that is foreseen: not to where all that is
        left would make items the same.

        Args:
            reading: after the token.
            ahead: what was read since the sequence's last token.
            token_id: the last of that.
            matcher: as it was before that.
            budget: how many masks may yet be made for a look ahead.
        """
        budget[0] -= 1
        if budget[0] < 0:
            return True
        if reading.in_string and self._may_differ(reading, ahead, token_id, matcher):
            return True
        follower = matcher.deep_copy()
        if not follower.consume_token(token_id):
            return False
        bits: Bits = np.zeros_like(self._tokens.quotes)
        follower.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if _count(bits) > _MOST_ALLOWED:
            return True  # a free text is no dead end
        if self._may_begin_any(reading, bits):
            return True
        ways = self._ways(bits)
        if len(ways) > _MOST_WAYS:
            for dangerous_id, after in self._dangerous(reading, ahead, bits):
                if after is None:
                    self._forbid(dangerous_id, reading, bits)
            ways = self._ways(bits)
        if len(ways) > _MOST_WAYS:
            return True
        for way in ways:
            token = self._tokens.of[way]
            after = self._reader.after(reading, ahead, token)
            text = ahead + token
            if after is None or not self._has_choice(after, text):
                continue
            if not self._repeats(after, text) or self._can_go_on(
                after, text, way, follower, budget
            ):
                return True
        return False

    def _may_differ(
        self, reading: Reading, ahead: bytes, token_id: int, matcher: LLMatcher
    ) -> bool:
        """Whether the string that is being read after a token may go on by a character by which no
        item does that is there: then it can end as the grammar lets it."""
        if reading.escaped or any(each.place.items for each in frames(reading.frame)):
            return False
        for sample in self._tokens.letters:
            text = ahead + self._tokens.of[sample]
            if not any(self._begins_alike(each, reading, text) for each in frames(reading.frame)):
                return matcher.validate_tokens([token_id, sample]) == 2
        return False

    def _begins_alike(self, frame: Frame, reading: Reading, ahead: bytes) -> bool:
        """Whether an item of an array begins as the one does that is being read."""
        if not frame.keys:
            return False
        so_far = self._reader.item_so_far(reading, frame, ahead)
        return any(text.startswith(so_far) for text in frame.texts)

    def _may_begin_any(self, reading: Reading, bits: Bits) -> bool:
        """Whether a string comes that may begin in more ways than could all be dead ends."""
        frame = reading.frame
        if frame is not None and frame.keys is not None and frame.place.items is not None:
            return False
        beginnings = bits & self._tokens.string_beginnings
        return _count(beginnings) > _MOST_WAYS

    def _ways(self, bits: Bits) -> list[int]:
        """The allowed tokens that lead to different places: white space leads nowhere new, and the
        shortest of tokens that begin alike stands for the others."""
        numbers = numbers_of(bits)
        ways = [n for n in numbers if not self._tokens.of[n][:1].isspace()]
        ways = ways or [n for n in numbers if self._tokens.of[n].strip()]
        if 1 < len(ways) <= _MOST_WAYS:
            first = min(ways, key=lambda n: len(self._tokens.of[n]))
            beginning = self._tokens.of[first]
            if beginning and all(self._tokens.of[n].startswith(beginning) for n in ways):
                return [first]
        return ways


def _count(bits: Bits) -> int:
    """How many bits are set."""
    return int.from_bytes(bits.tobytes()).bit_count()
