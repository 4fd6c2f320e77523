"""Stop strings are found wherever the text is cut, and hold back no more than they must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_frontend.stop_strings import StopStrings


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """Character by character over the whole text: the first to be complete wins."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def search(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    strings = StopStrings(stops, include_in_output=include)
    told = []
    for piece in pieces:
        text, stop = strings.feed(piece)
        told.append(text)
        if stop is not None:
            return "".join(told), stop
    return "".join([*told, strings.finish()]), None


letters = st.text(alphabet="abc", max_size=6)


@settings(max_examples=250)
@given(
    pieces=st.lists(letters, max_size=12),
    stops=st.lists(letters.filter(bool), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_split_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    expected = reference("".join(pieces), stops, include=include)
    assert search(pieces, stops, include=include) == expected


@settings(max_examples=150)
@given(pieces=st.lists(letters, max_size=12), stop=letters.filter(bool))
def test_only_a_proper_prefix_of_a_stop_is_held_back(pieces: list[str], stop: str) -> None:
    strings = StopStrings([stop])
    fed = told = ""
    for piece in pieces:
        text, found = strings.feed(piece)
        if found:
            return
        fed, told = fed + piece, told + text
        held = fed[len(told) :]
        assert held == "" or (stop.startswith(held) and held != stop)
        longer = [n for n in range(len(held) + 1, len(stop)) if fed.endswith(stop[:n])]
        assert not longer


def test_nothing_is_held_back_when_the_text_has_no_part_of_the_stop() -> None:
    strings = StopStrings(["abcdef"])
    assert [strings.feed(char)[0] for char in "xyz bcdef"] == list("xyz bcdef")


def test_held_text_is_told_at_the_end() -> None:
    strings = StopStrings(["abcdef"])
    assert strings.feed("xabcde") == ("x", None)
    assert strings.finish() == "abcde"


def test_a_stop_in_the_middle_of_a_piece_cuts_exactly() -> None:
    assert StopStrings(["STOP"]).feed("go STOP on") == ("go ", "STOP")
    including = StopStrings(["STOP"], include_in_output=True)
    assert including.feed("go STOP on") == ("go STOP", "STOP")


def test_the_stop_that_is_complete_first_wins() -> None:
    assert StopStrings(["late one", "one"]).feed("a late one") == ("a ", "late one")
    assert StopStrings(["abcd", "b"]).feed("xabcd") == ("xa", "b")


def test_a_stop_completed_while_suspended_is_passed_over() -> None:
    strings = StopStrings(["ab"])
    assert strings.feed("xaby", suspended=True) == ("xaby", None)
    assert strings.feed("zab") == ("z", "ab")


def test_a_stop_begun_while_suspended_counts_when_completed_later() -> None:
    strings = StopStrings(["abc"])
    assert strings.feed("xab", suspended=True) == ("x", None)
    assert strings.feed("c") == ("", "abc")
