"""Jinja's filters and tests, and text's methods, as chat templates may use them: within the budget.

What one makes is charged before it is made where that can be told, and else when it is made.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from typing import Any

from pagewire_frontend.template_budget import (
    BudgetExceededError,
    charge,
    charge_text,
    check_bytes,
    check_walk,
    counted,
    step,
    weigh,
)

MAX_INT_ARGUMENT = 100_000  # what Jinja's sandbox allows range() to be
_MAX_BITS = 65_536
# Filters that look at no more than the value itself, or at its items one by one.
_SHALLOW = frozenset(("abs", "attr", "batch", "count", "d", "default", "filesizeformat", "first"))
_SHALLOW |= {"float", "int", "items", "last", "length", "list", "map", "reject", "rejectattr"}
_SHALLOW |= {"reverse", "round", "select", "selectattr", "slice"}
# Those that take all items at once.
_GATHERING = frozenset(("groupby", "join", "max", "min", "sort", "sum", "unique"))
# Those that compare or hash what is in the value, and make no text of it.
_COMPARING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
# Those that make a longer text of a text.
_LENGTHENING = frozenset(("pprint", "string", "tojson", "urlencode"))
# Those that take a text apart by regular expressions, and how many times longer that takes.
_SLOWER = {"wordwrap": 1000, "pprint": 100, "striptags": 100, "title": 100, "urlencode": 100}
COMPARING_TESTS = frozenset(("!=", "<", "<=", "==", ">", ">=", "in", "lower", "upper"))
COMPARING_TESTS |= {"eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lt", "ne"}
_LONG_NUMBER = re.compile(r"\d{6}")
_WIDTH_FROM_A_VALUE = re.compile(r"\{[^{}]*:[^{}]*\{|%(\([^)]*\))?[#0\- +]*(\*|\d*\.\*)")


def guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, within the budget."""
    passes = getattr(function, "jinja_pass_arg", None)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        step()
        own = args[:1] if passes is not None else ()
        value, *rest = args[len(own) :] or (None,)
        if name in _GATHERING and not isinstance(value, str | Mapping):
            value = list(counted(value))
        _check_filter(name, value, rest, kwargs)
        return made(function(*own, value, *rest, **kwargs))

    return guarded


def _check_filter(name: str, value: Any, rest: list[Any], kwargs: dict[str, Any]) -> None:
    if name in _COMPARING:
        check_walk(list(value) if isinstance(value, str) else value)
    elif name not in _SHALLOW and not isinstance(value, str):
        charge(weigh(value))
    if name in _SLOWER:
        check_bytes(_SLOWER[name] * weigh(value))
    if name == "indent":
        width = rest[0] if rest else kwargs.get("width", 4)
        text = str(value)
        spaces = (text.count("\n") + 1) * (width if isinstance(width, int) else 4)
        charge_text(len(text) + spaces, text)
    elif name == "join":
        separator = rest[0] if rest else kwargs.get("d", "")
        check_walk(separator)
        charge(sys.getsizeof(str(separator)) * len(value))
    elif name in ("replace", "format", "center"):
        check_text_call(name, str(value), tuple(rest), kwargs)
    elif isinstance(value, str) and name in _LENGTHENING:
        charge(weigh(value))
    if name not in ("d", "default"):  # they hand their argument on as it is
        _check_arguments((*rest, *kwargs.values()))


def guarded_test(name: str, function: Any) -> Callable[..., Any]:
    """The test, one of COMPARING_TESTS, within the budget."""

    @functools.wraps(function)
    def guarded(value: Any, *args: Any) -> Any:
        places = map(searched, args) if name == "in" else map(compared, args)
        return function(compared(value), *places)

    return guarded


def compared(value: Any) -> Any:
    """The value, to be compared with another."""
    step()
    check_walk(value)
    return value


def searched(value: Any) -> Any:
    """The value, to be searched by `in`. What a mapping has is looked up: no need to walk it."""
    step()
    if isinstance(value, Iterator | ValuesView):
        return counted(value)
    if not isinstance(value, Mapping):
        check_walk(value)
    return value


def looked_up(key: Any) -> Any:
    """The key, to be hashed, and told of where it is none."""
    check_walk(key)
    return key


def made(value: Any) -> Any:
    """Charges what was made already: a copy of something that was within bounds."""
    size = sys.getsizeof(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        size += sum(map(sys.getsizeof, value))
    charge(size)
    return value


def text_of(value: Any) -> str:
    """The value as text."""
    if not isinstance(value, str):
        charge(weigh(value))
    return str(value)


def joined(pieces: Iterable[str]) -> str:
    """What a macro or a block of text makes. Its pieces may be the same long text, many times."""
    pieces = list(pieces)
    charge_text(sum(map(len, pieces)), *pieces)
    return "".join(pieces)


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises unless the operator may be applied."""
    if operator == "*":
        for thing, times in ((left, right), (right, left)):
            if isinstance(thing, str | list | tuple) and isinstance(times, int):
                charge(sys.getsizeof(thing) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            charge(sys.getsizeof(left) + sys.getsizeof(right))
    elif operator == "-":
        check_walk(left, right)
    elif isinstance(left, str):
        check_format(left, list(right) if isinstance(right, tuple) else [right])


def check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises unless a method of text may be called, by its name."""
    if name == "replace":
        old, new = (*args, *kwargs.values(), "", "")[:2]
        times = text.count(str(old)) if old else len(text) + 1
        charge_text(len(text) + times * len(str(new)), text, str(new))
    elif name == "join" and args:
        items = args[0]
        count = len(items) if isinstance(items, list | tuple) else MAX_INT_ARGUMENT
        charge(weigh(items) + sys.getsizeof(text) * count)
    elif name == "expandtabs":
        width = args[0] if args and isinstance(args[0], int) else 8
        charge_text(len(text) + text.count("\t") * width, text)
    elif name == "format":
        check_format(text, [*args, *kwargs.values()])
    _check_arguments((*args, *kwargs.values()))


def check_format(pattern: str, values: list[Any]) -> None:
    """Raises unless the values may be put into the pattern, `%` or `{}`."""
    if _LONG_NUMBER.search(pattern):
        raise BudgetExceededError("a format asks for a width of more than five digits")
    if _WIDTH_FROM_A_VALUE.search(pattern):
        raise BudgetExceededError("a format takes a width from a value")
    fields = pattern.count("{") + pattern.count("%")
    widest = max(map(int, re.findall(r"\d+", pattern)), default=0)
    charge(sys.getsizeof(pattern) + fields * (weigh(values) + widest))


def _check_arguments(values: tuple[Any, ...]) -> None:
    check_walk(*values)
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_INT_ARGUMENT:
            raise BudgetExceededError(f"it passes a number above {MAX_INT_ARGUMENT}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise BudgetExceededError("it computes with numbers of thousands of digits")
