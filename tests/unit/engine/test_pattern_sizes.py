"""How long the texts are that a pattern matches, held to what `re` matches."""

from __future__ import annotations

import re
import string

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pagewire_engine.json_schemas.pattern_sizes import pattern_sizes

Known = tuple[str, int, int | None]

_ATOMS: list[Known] = [
    *((char, 1, 1) for char in string.ascii_letters[:6] + "-,:@ /]}"),
    *((escape, 1, 1) for escape in (r"\.", r"\d", r"\S", r"\\", r"\n", r"\x41", r"\u00e9", r"\-")),
    *((each, 1, 1) for each in (".", "[a-z]", "[^a)]", r"[\]\d(]", "[]|]", "[^]{]")),
    (r"\b", 0, 0),
    ("^", 0, 0),
]


def _times(one: Known, least: int, most: int | None, sign: str) -> Known:
    pattern, low, high = one
    if most == 0 or high == 0:
        longest: int | None = 0
    else:
        longest = None if high is None or most is None else high * most
    return f"{pattern}{sign}", low * least, longest


@st.composite
def _repeated(draw: st.DrawFn, inner: st.SearchStrategy[Known]) -> Known:
    pattern, least, most = draw(inner)
    group = (f"{draw(st.sampled_from(['(', '(?:', '(?P<name>']))}{pattern})", least, most)
    low, more = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    repetitions: list[tuple[int, int | None, str]] = [
        (1, 1, ""),
        (0, None, "*"),
        (1, None, "+"),
        (0, 1, "?"),
        (0, None, "*?"),
        (low, low, f"{{{low}}}"),
        (low, None, f"{{{low},}}"),
        (low, low + more, f"{{{low},{low + more}}}"),
    ]
    return _times(group, *draw(st.sampled_from(repetitions)))


def _joined(parts: list[Known]) -> Known:
    most = [part[2] for part in parts]
    longest = None if None in most else sum(each or 0 for each in most)
    return "".join(part[0] for part in parts), sum(part[1] for part in parts), longest


def _either(parts: list[Known]) -> Known:
    most = [part[2] for part in parts]
    longest = None if None in most else max(each or 0 for each in most)
    pattern = "|".join(part[0] for part in parts)
    return f"(?:{pattern})", min(part[1] for part in parts), longest


_PATTERNS = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        _repeated(inner),
        st.lists(inner, min_size=1, max_size=3).map(_joined),
        st.lists(inner, min_size=1, max_size=3).map(_either),
    ),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_PATTERNS)
def test_a_pattern_put_together_has_the_sizes_of_its_parts(known: Known) -> None:
    pattern, least, most = known
    found = pattern_sizes(pattern)
    assert found is not None
    assert (found.least, found.most) == (least, most)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_text_that_re_matches_is_of_these_sizes(data: st.DataObject) -> None:
    pattern, *_ = data.draw(_PATTERNS.filter(lambda each: not set("^") & set(each[0])))
    pattern = pattern.replace(r"\b", "").replace("?P<name>", "") or "a"
    try:
        re.compile(pattern)
    except re.error:
        return
    sizes = pattern_sizes(pattern)
    assert sizes is not None
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    assert sizes.least <= len(text)
    assert sizes.most is None or len(text) <= sizes.most


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("", (0, 0, 0)),
        ("^[a-z]{2,8}(-[0-9]+)?$", (2, None, 2)),
        (r"^#([0-9a-f]{3}|[0-9a-f]{6})$", (4, 7, 6)),
        (r"^(?=.*\d)a{3}$", (3, 3, 3)),
        ("^(?!x)(a|)b$", (1, 2, 2)),
        ("a{b}{", (5, 5, 5)),
        ("a{}", (3, 3, 3)),
        ("(((a{9}){9}){9}){9}", (6561, 6561, 6561)),
        ("((a{999}){999}){999}", (1 << 20, None, 1 << 20)),
        (r"\p{L}+", (1, None, 1)),
    ],
)
def test_what_schemas_say(pattern: str, sizes: tuple[int, int | None, int]) -> None:
    assert pattern_sizes(pattern) == sizes


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?i)a", "a**", "*a", "(a", "a)", "[a", "a\\", "a{3,1}", "a{,3}", "(?(1)a|b)"],
)
def test_of_what_it_does_not_read_it_says_nothing(pattern: str) -> None:
    assert pattern_sizes(pattern) is None


def test_one_that_is_nested_without_end_hurts_nobody() -> None:
    assert pattern_sizes("(" * 5000 + ")" * 5000) is None
