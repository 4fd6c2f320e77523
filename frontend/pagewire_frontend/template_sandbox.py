"""The Jinja environment that chat templates run in, and what it keeps them from doing.

A template comes with a model, or with a request: it is somebody else's program. It runs in Jinja's
immutable sandbox (no attribute that leads to Python's own objects, nothing of the request changed),
under a budget:

- each turn of a loop, each call and each filter is a step; steps are bounded, and so is the
  processor time;
- no single string or list made by an operator, a method or a filter grows past MAX_BYTES, and all
  of them together not past MAX_TOTAL_BYTES;
- the rendered prompt is bounded by MAX_CHARACTERS.

The guarantee: rendering ends, after little more than MAX_SECONDS of processor time and with no more
than MAX_TOTAL_BYTES of memory, whatever the template says.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 8_000_000
MAX_BYTES = 32_000_000
MAX_TOTAL_BYTES = 512_000_000
MAX_NODES = 200_000  # of nested lists and objects that are made into text
MAX_STEPS = 4_000_000
MAX_SECONDS = 2.0
MAX_INT_ARGUMENT = 100_000  # what Jinja's sandbox allows range() to be
_MAX_BITS = 65_536
_STEPS_BETWEEN_CLOCK_READS = 16


class BudgetExceededError(TemplateError):
    """The template did more than a template may."""


class TemplateRefusalError(TemplateError):
    """The template called raise_exception: it can't take these messages."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self._steps = 0
        self._bytes = 0
        self._until = time.thread_time() + MAX_SECONDS
        self.now = datetime.now()

    def step(self) -> None:
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLOCK_READS == 0:
            if self._steps > MAX_STEPS:
                raise BudgetExceededError(f"it takes more than {MAX_STEPS} steps")
            if time.thread_time() > self._until:
                raise BudgetExceededError(f"it takes more than {MAX_SECONDS} s")

    def charge(self, size: int) -> None:
        """Raises unless something of this many bytes may be made."""
        _check_bytes(size)
        self._bytes += size
        if self._bytes > MAX_TOTAL_BYTES:
            raise BudgetExceededError(f"it makes more than {MAX_TOTAL_BYTES} bytes of text")


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def render_within_budget(
    generate: Callable[..., Iterable[str]], variables: Mapping[str, Any]
) -> str:
    """Joins what a compiled template generates. Raises BudgetExceededError when it is too much."""
    token = _budget.set(Budget())
    try:
        pieces: list[str] = []
        size = 0
        for piece in generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise BudgetExceededError(f"the prompt has more than {MAX_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def _step() -> None:
    if budget := _budget.get():
        budget.step()


def _charge(size: int) -> None:
    # Without a budget Jinja is folding constants as it compiles.
    if budget := _budget.get():
        budget.charge(size)
    else:
        _check_bytes(size)


def _check_bytes(size: int) -> None:
    if size > MAX_BYTES:
        raise BudgetExceededError(f"it makes something of more than {MAX_BYTES} bytes")


def _charge_text(length: int, *made_of: str) -> None:
    _charge(length if all(text.isascii() for text in made_of) else 4 * length)


def _weigh(value: Any) -> int:
    """About how many bytes the value's text takes. Lists that hold each other twice are
    exponentially long: what takes too long to walk may not be made into text."""
    weight = nodes_seen = 0
    rest = [value]
    while rest:
        item = rest.pop()
        nodes_seen += 1
        if nodes_seen > MAX_NODES:
            raise BudgetExceededError(f"it makes text of more than {MAX_NODES} values")
        if isinstance(item, str | bytes):
            weight += sys.getsizeof(item)
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            _check_bytes(8 * len(item))
            rest += item
        else:
            weight += 8
    return weight


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for chat templates, under a budget."""

    def __init__(self) -> None:
        self.intercepted_binops = frozenset(("+", "*", "**", "%"))
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters["tojson"] = _tojson
        for name in ("urlize", "xmlattr", "random"):
            del self.filters[name]
        self.filters = {name: _guarded(name, f) for name, f in self.filters.items()}
        self.filters |= {_COUNTED: _counted, _TEXT: _text, _MADE: _made}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PublicNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parser = Parser(self, source, name, filename)
        tree: nodes.Template = _BudgetedNodes().visit(parser.parse())
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Bytes and numbers have methods that make gigabytes, and no honest template calls one.
        if attr in _UNBOUNDED_METHODS or isinstance(obj, bytes | int | float):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _step()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if not isinstance(owner, str):
            return super().call(__context, __obj, *args, **kwargs)
        _check_text_call(name, owner, args, kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_format(pattern, [*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return guarded


_COUNTED = "_counted"
_TEXT = "_text"
_MADE = "_made"
# Of text: what one makes grows with the argument, or is bytes, which no operator here weighs.
_UNBOUNDED_METHODS = frozenset(("translate", "maketrans", "encode"))


class _BudgetedNodes(NodeTransformer):
    """Rewrites a template so that the budget sees its loops, its `~` and its slices."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        texts: list[nodes.Expr] = [
            nodes.Filter(part, _TEXT, [], [], None, None, lineno=node.lineno) for part in node.nodes
        ]
        joined = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return nodes.Filter(node, _MADE, [], [], None, None, lineno=node.lineno)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


def _made(value: Any) -> Any:
    """Charges what was made already: a copy of something that was within bounds."""
    size = sys.getsizeof(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        size += sum(map(sys.getsizeof, value))
    _charge(size)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _charge(_weigh(value))
    return str(value)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name like {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    budget = _budget.get()
    if len(pattern) > 1000:
        raise BudgetExceededError("the date's pattern is too long")
    return (budget.now if budget else datetime.now()).strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Hugging Face's: Jinja's own escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _finalize(value: Any) -> Any:
    if not isinstance(value, str):
        _charge(_weigh(value))
    return value


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(function, "jinja_pass_arg", None)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _step()
        given = args[1:] if passes is not None else args
        value: Any = given[0] if given else None
        rest = given[1:]
        if name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            text = str(value)
            spaces = (text.count("\n") + 1) * (width if isinstance(width, int) else 4)
            _charge_text(len(text) + spaces, text)
        elif name == "join":
            separator = rest[0] if rest else kwargs.get("d", "")
            items = list(value)
            given = (items, *rest)
            args = (*args[: len(args) - len(given)], *given)
            _charge(_weigh(items) + sys.getsizeof(str(separator)) * len(items))
        elif name in _MAKE_TEXT:
            _charge(_weigh(value))
        if name in ("replace", "format", "center"):
            _check_text_call(name, str(value), rest, kwargs)
        _check_integers((*rest, *kwargs.values()))
        return _made(function(*args, **kwargs))

    return guarded


_MAKE_TEXT = frozenset(("string", "tojson", "pprint", "replace", "format", "sum", "urlencode"))
_LONG_NUMBER = re.compile(r"\d{6}")
_WIDTH_FROM_A_VALUE = re.compile(r"\{[^{}]*:[^{}]*\{|%(\([^)]*\))?[#0\- +]*(\*|\d*\.\*)")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for thing, times in ((left, right), (right, left)):
            if isinstance(thing, str | list | tuple) and isinstance(times, int):
                _charge(sys.getsizeof(thing) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _charge(sys.getsizeof(left) + sys.getsizeof(right))
    elif isinstance(left, str):
        _check_format(left, list(right) if isinstance(right, tuple) else [right])


def _check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name == "replace":
        old, new = (*args, *kwargs.values(), "", "")[:2]
        times = text.count(str(old)) if old else len(text) + 1
        _charge_text(len(text) + times * len(str(new)), text, str(new))
    elif name == "join" and args:
        items = args[0]
        count = len(items) if isinstance(items, list | tuple) else MAX_INT_ARGUMENT
        _charge(_weigh(items) + sys.getsizeof(text) * count)
    elif name == "expandtabs":
        width = args[0] if args and isinstance(args[0], int) else 8
        _charge_text(len(text) + text.count("\t") * width, text)
    elif name == "format":
        _check_format(text, [*args, *kwargs.values()])
    _check_integers((*args, *kwargs.values()))


def _check_format(pattern: str, values: list[Any]) -> None:
    if _LONG_NUMBER.search(pattern):
        raise BudgetExceededError("a format asks for a width of more than five digits")
    if _WIDTH_FROM_A_VALUE.search(pattern):
        raise BudgetExceededError("a format takes a width from a value")
    fields = pattern.count("{") + pattern.count("%")
    widest = max(map(int, re.findall(r"\d+", pattern)), default=0)
    _charge(sys.getsizeof(pattern) + fields * (_weigh(values) + widest))


def _check_integers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_INT_ARGUMENT:
            raise BudgetExceededError(f"it passes a number above {MAX_INT_ARGUMENT}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise BudgetExceededError("it computes with numbers of thousands of digits")
