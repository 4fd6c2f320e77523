"""Regular expressions without look-around: for texts but certain ones, and for what a look-ahead
at the beginning of a pattern excludes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pagewire_engine.json_schemas.pattern_sizes import Sizes, pattern_sizes

_ANY = r"[\s\S]"
# Literal text of a pattern: plain characters, and escaped punctuation.
_LITERAL = r"(?:[^\\.^$|?*+()\[\]{}]|\\[^\w\s])"
_LITERALS = rf"{_LITERAL}+(?:\|{_LITERAL}+)*"
_WHOLE = re.compile(rf"\^(?:({_LITERAL}*)|\(\??:?({_LITERALS})\))\$")
_PREFIX = re.compile(rf"\^({_LITERAL}+)")
_EXCLUDED_WORD = rf"{_LITERAL}+\$?"
_LOOK_AHEAD = re.compile(
    rf"\(\?!(?:({_EXCLUDED_WORD}(?:\|{_EXCLUDED_WORD})*)|\((?:\?:)?({_LITERALS})\)(\$?))\)"
)
_FIRST_CLASS = re.compile(r"\^\[(\^?)((?:\\.|[^\]\\\[])+)\](?![*?]|\{0?,|\{0\})")
_ANCHORED_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
_MOST_CHARACTERS = 4096


class _Node:
    """Texts that begin alike.

    Attributes:
        children: what may follow, by character.
        ends: a text that is excluded ends here.
        dead: and so is all that begins with it.
    """

    __slots__ = ("children", "dead", "ends")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.ends = False
        self.dead = False

    def pattern(self) -> str:
        """What is left, as an expression from here to the text's end."""
        ways = [] if self.ends else [""]
        followed = "".join(_escaped_in_class(char) for char in self.children)
        ways.append(f"[^{followed}]{_ANY}*" if followed else f"{_ANY}+")
        for char, child in self.children.items():
            if not child.dead:
                ways.append(re.escape(char) + child.pattern())
        return f"(?:{'|'.join(ways)})"


def all_texts_but(texts: Iterable[str], prefixes: Iterable[str] = ()) -> str | None:
    """A pattern for every text that is none of `texts` and begins with none of `prefixes`; None
    where it would be too long."""
    root = _Node()
    num_characters = 0
    for word, is_prefix in (*((text, False) for text in texts), *((p, True) for p in prefixes)):
        num_characters += len(word)
        if num_characters > _MOST_CHARACTERS or (is_prefix and not word):
            return None
        node = root
        for char in word:
            node = node.children.setdefault(char, _Node())
        node.ends = True
        node.dead = node.dead or is_prefix
    try:
        return f"^{root.pattern()}$"
    except RecursionError:
        return None


def texts_of(pattern: str) -> list[str] | None:
    """The texts that a pattern such as `^(one|two)$` matches; None where it is of another kind."""
    found = _WHOLE.fullmatch(pattern)
    if found is None:
        return None
    alternatives = found[1] if found[1] is not None else found[2]
    return [_plain(text) for text in _split(alternatives)]


def prefix_of(pattern: str) -> str | None:
    """What a pattern such as `^x-` says that a text begins with, and no more; else None."""
    found = _PREFIX.fullmatch(pattern)
    return None if found is None else _plain(found[1])


def other_beginnings(pattern: str) -> str | None:
    """A pattern for texts whose first character is none that a pattern such as `^[a-z]+...` begins
    with; None for a pattern of another kind."""
    found = _FIRST_CLASS.match(pattern)
    if found is None or _is_alternatives(pattern):
        return None
    return f"^[{'' if found[1] else '^'}{found[2]}]"


def sizes_of(pattern: str) -> Sizes | None:
    """How many characters a text has at least and at most that an anchored pattern matches; None
    for a pattern that may be found within a longer text, or that Python does not read."""
    if not (pattern.startswith("^") and _ANCHORED_END.search(pattern)) or _is_alternatives(pattern):
        return None
    if not _is_read(pattern):
        return None
    return pattern_sizes(pattern)


def without_look_aheads(pattern: str) -> list[str] | None:
    """Patterns that together match what this one does, or less.

    Args:
        pattern: one that excludes literal texts or beginnings where it begins: `^(?!a$|b-)...`.

    Returns:
        Patterns without look-around; None where that can't be said so simply.
    """
    if not pattern.startswith("^"):
        return None
    texts: list[str] = []
    prefixes: list[str] = []
    place = 1
    while found := _LOOK_AHEAD.match(pattern, place):
        place = found.end()
        words = _split(found[1]) if found[1] else [w + found[3] for w in _split(found[2])]
        for word in words:
            if word.endswith("$"):
                texts.append(_plain(word[:-1]))
            else:
                prefixes.append(_plain(word))
    rest = pattern[place:]
    if place == 1 or has_look_around(rest) or _is_alternatives(rest):
        return None
    # Python's `$` is found before a last line break too.
    texts += [text + "\n" for text in texts]
    excluding = all_texts_but(texts, prefixes)
    if excluding is None:
        return None
    return [excluding] if rest in ("", ".*") else [excluding, f"^{rest}"]


def found_everywhere(pattern: str) -> bool:
    """Whether it is sure that a pattern is found in every text: where it begins, it matches nothing
    already, and it says nothing of what follows."""
    if any(sign in pattern for sign in ("$", "\\", "(?")):
        return False
    try:
        return re.match(pattern, "") is not None
    except (re.error, RecursionError):
        return False


def has_look_around(pattern: Any) -> bool:
    """Whether it has what the expressions of llguidance have not."""
    return isinstance(pattern, str) and any(
        sign in pattern for sign in ("(?=", "(?!", "(?<=", "(?<!")
    )


def matches(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None where Python does not read it."""
    try:
        return re.search(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def _is_read(pattern: str) -> bool:
    """Whether Python reads it."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _is_alternatives(pattern: str) -> bool:
    """Whether `|` stands outside of any group."""
    depth = 0
    for char in re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def _split(alternatives: str) -> list[str]:
    return re.split(r"(?<!\\)\|", alternatives)


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _escaped_in_class(char: str) -> str:
    return "\\" + char if char in "\\]^-[&~" else char
