"""The Jinja environment that chat templates run in, and what it keeps them from doing.

A template comes with a model, or with a request: it is somebody else's program. It runs in Jinja's
immutable sandbox (no attribute that leads to Python's own objects, nothing of the request changed),
under a budget:

- each turn of a loop, each call and each filter is a step; steps are bounded, and so is the
  processor time;
- no single string or list made by an operator, a method or a filter grows past MAX_BYTES, and all
  of them together not past MAX_TOTAL_BYTES;
- what is compared, hashed or looked up is bounded too, for Python does that in one go;
- the rendered prompt is bounded by MAX_CHARACTERS.

The guarantee: rendering ends, after little more than MAX_SECONDS of processor time and with no more
than MAX_TOTAL_BYTES of memory, whatever the template says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pagewire_frontend import template_filters
from pagewire_frontend.template_budget import (
    BudgetExceededError,
    charge,
    check_walk,
    counted,
    now,
    step,
    weigh,
)
from pagewire_frontend.template_filters import check_format, check_operands, check_text_call, made

# Python compiles a template in one go, in half a second for so many. The largest of a well-known
# model has 1,300.
MAX_TEMPLATE_NODES = 20_000


class TemplateRefusalError(TemplateError):
    """The template called raise_exception: it can't take these messages."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment for chat templates, under a budget."""

    concat = staticmethod(template_filters.joined)  # of the pieces of macros and blocks

    def __init__(self) -> None:
        self.intercepted_binops = frozenset(("+", "-", "*", "**", "%"))
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
        self.filters = {
            name: template_filters.guarded_filter(name, f) for name, f in self.filters.items()
        } | _OWN_FILTERS
        for name in template_filters.COMPARING_TESTS:
            self.tests[name] = template_filters.guarded_test(name, self.tests[name])
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PublicNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parser = Parser(self, source, name, filename)
        parsed = parser.parse()
        if sum(1 for _ in parsed.find_all(nodes.Node)) > MAX_TEMPLATE_NODES:
            raise BudgetExceededError(f"it has more than {MAX_TEMPLATE_NODES} parts")
        tree: nodes.Template = _BudgetedNodes().visit(parsed)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Bytes and numbers have methods that make gigabytes, and no honest template calls one.
        if attr in _UNBOUNDED_METHODS or isinstance(obj, bytes | int | float):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        step()
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if not isinstance(owner, str):
            if not isinstance(__obj, Macro | LoopContext):
                # What a namespace or a dict is given by name is kept, and no more.
                check_walk(*args, *(() if isinstance(__obj, type) else kwargs.values()))
            if name in _COMPARING_METHODS:
                check_walk(owner)
            return super().call(__context, __obj, *args, **kwargs)
        check_text_call(name, owner, args, kwargs)
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def guarded(*args: Any, **kwargs: Any) -> str:
            check_format(pattern, [*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return guarded


_COMPARING_METHODS = frozenset(("count", "index"))  # of lists
# Of text: what one makes grows with the argument, or is bytes, which no operator here weighs.
_UNBOUNDED_METHODS = frozenset(("translate", "maketrans", "encode"))
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "_compared": template_filters.compared,
    "_counted": counted,
    "_looked_up": template_filters.looked_up,
    "_made": made,
    "_searched": template_filters.searched,
    "_text": template_filters.text_of,
}


class _BudgetedNodes(NodeTransformer):
    """Rewrites a template so that the budget sees its loops, its `~`, its slices, and what it
    compares and looks up."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        texts = [_through("_text", part) for part in node.nodes]
        joined: nodes.Expr = texts[0]
        for text in texts[1:]:
            joined = nodes.Add(joined, text, lineno=node.lineno)
        return joined

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _through("_made", node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _through("_looked_up", node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _through("_looked_up", pair.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                operand.expr = _through("_searched", right)
            elif not isinstance(left, nodes.Const) and not isinstance(right, nodes.Const):
                operand.expr = _through("_compared", right)
            left = right
        if not isinstance(node.expr, nodes.Const):
            node.expr = _through("_compared", node.expr)
        return node


def _through(own_filter: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, own_filter, [], [], None, None, lineno=node.lineno)


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
    if len(pattern) > 1000:
        raise BudgetExceededError("the date's pattern is too long")
    return now().strftime(pattern)


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
        charge(weigh(value))
    return value
