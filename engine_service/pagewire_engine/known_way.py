"""What is left of a way to the end of an output once the output has gone on."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire_engine.token_bytes import TokenBytes

_STRUCTURE = (b'"', b"{", b"}", b"[", b"]", b",", b":")


def rest_after(
    way: Sequence[int],
    token_id: int,
    text: bytes,
    tokens: TokenBytes,
    *,
    is_json: bool,
    in_string: bool,
) -> list[int] | None:
    """What is left of a way after a token whose text it begins with; None if it does not. A grammar
    does not ask in which tokens a text comes, and JSON not for white space.

    Args:
        way: tokens.
        token_id: with which the output has gone on.
        text: of its bytes those that the way is for: of reasoning's end it is not all.
        tokens: the vocabulary's.
        is_json: the output is JSON.
        in_string: the token begins within a string of it.
    """
    if way and way[0] == token_id:
        return [*way[1:]]
    # Reasoning has ended within the token, or before it; or a control token has begun it.
    if text != tokens.of[token_id] or not text:
        return None
    rest = _after(way, text, tokens)
    if rest is not None or not is_json:
        return rest
    bare = without_space(text, in_string=in_string)
    rest = None if bare == text else _after(way, bare, tokens)
    # A number does not go on after white space.
    return rest if rest and tokens.of[rest[0]][:1] in _STRUCTURE else None


def _after(way: Sequence[int], text: bytes, tokens: TokenBytes) -> list[int] | None:
    """What is left of a way after a text that it begins with; None if it does not."""
    of = tokens.of
    if not text:
        return [*way] or None
    for index, part in enumerate(of[each] for each in way):
        if not part:
            return None
        if len(part) > len(text):
            rest = tokens.by_bytes.get(part[len(text) :])
            if rest is None or not part.startswith(text):
                return None
            return [rest[0], *way[index + 1 :]]
        if not text.startswith(part):
            return None
        text = text[len(part) :]
        if not text:
            return [*way[index + 1 :]]
    return None


def without_space(text: bytes, *, in_string: bool) -> bytes:
    """A JSON text without the white space between its parts; as it is where it has some of a
    string's text too.

    Args:
        text: part of a JSON text.
        in_string: it begins within a string.
    """
    bare = text.translate(None, b" \t\r\n")
    if bare == text:
        return text
    within = text.split(b'"')[0 if in_string else 1 :: 2]
    return text if any(within) else bare
