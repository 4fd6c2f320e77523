"""What is left of a way once an output has gone on."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire_engine.known_way import rest_after, without_space


@pytest.mark.parametrize(
    ("text", "in_string", "bare"),
    [
        (b' ,\n "', False, b',"'),
        (b'" : ', True, b'":'),
        (b'" }', True, b'"}'),
        (b'a" :', True, b'a" :'),
        (b'"a b', False, b'"a b'),
        (b", ", True, b", "),
        (b'" ', False, b'" '),
        (b" \t", False, b""),
    ],
)
def test_white_space_between_parts_is_passed_over_and_none_within_a_string(
    text: bytes, in_string: bool, bare: bytes
) -> None:
    assert without_space(text, in_string=in_string) == bare


def test_a_way_is_not_followed_by_what_is_only_part_of_a_token() -> None:
    """Of a token that ends reasoning a part is the answer's: the way is after all of it."""
    tokens: Any = SimpleNamespace(of=[b"</think>\n", b"\n", b"[", b"]", b"\n["], by_bytes={})
    after = partial(rest_after, [1, 2, 3], tokens=tokens, is_json=True, in_string=False)
    assert after(1, b"\n") == [2, 3]
    assert after(4, b"\n[") == [3]
    assert after(0, b"\n") is None
