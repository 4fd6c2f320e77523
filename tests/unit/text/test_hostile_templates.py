"""A template is somebody else's program: it ends soon, stays small and reaches nothing."""

from __future__ import annotations

import time

import pytest

from pagewire_frontend import template_budget
from pagewire_frontend.compiled_template import CompiledTemplate
from pagewire_frontend.errors import ChatTemplateError
from tests.fakes.yardstick import at_most

HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filters in loops": "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "tests in loops": "{% for a in range(999) if range(99999) | select | list %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "tree of macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "long output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "multiplied string": "{{ 'x' * (10 ** 10) }}",
    "multiplied list": "{% set x = [1] * 1000000000 %}",
    "doubling by +": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by join": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubling by format": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling by str.format": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling lists to JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "replace": "{% set x = 'x' * 1000000 %}{{ x.replace('x', x) }}",
    "replace filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "replace nothing": "{% set x = 'x' * 1000000 %}{{ x.replace('', x) }}",
    "join method": "{% set x = 'x' * 1000000 %}{{ x.join('y' * 100000) }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "center filter": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(100000) }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide format by argument": "{{ '%*d' % (1000000000, 1) }}",
    "wide str.format": "{{ '{:1000000000}'.format(1) }}",
    "wide str.format by argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=7) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "folded constant": "{{ 'x' | center(99999) | replace(' ', 'y' | center(99999)) }}",
    "pprint": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | pprint }}",
    "sum of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] | sum(start=[]) %}{% endfor %}",
    "map": "{{ ['x'] | map('center', 10000000000) | list }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop(b) if b else loop([a]) }}{% endfor %}",
    "many wide fields": "{{ ('{:99999}' * 2000).format(*range(2000)) }}",
    "many wide fields of one value": "{{ ('{0:99999}' * 20000).format(1) }}",
    "many wide fields by name": "{{ ('%(a)99999d' * 20000) % {'a': 1} }}",
    "width from an item": "{{ '{0:{1[0]}}'.format(1, [1000000000]) }}",
    "width from text": "{{ '{0:{1}}'.format(1, '1000000000') }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "multiplied bytes": "{{ 'x'.encode() * 10000000000 }}",
    "padded bytes": "{{ 'x'.encode().ljust(10000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'little') }}",
    "kept slices": "{% set x = 'x' * 600000 %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x, x[1:]] %}{% endfor %}",
    "kept words": "{% set x = 'x ' * 300000 %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x, x.split()] %}{% endfor %}",
    "kept padding": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x, 'x'.ljust(99999)] %}{% endfor %}",
    "doubling by blocks": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "doubling by callers": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set y %}{% call f() %}{{ ns.x }}"
    "{% endcall %}{% endset %}{% set ns.x = y %}{% endfor %}",
    "words of a long text": "{% set ns = namespace(x='a b ') %}{% for i in range(20) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | wordwrap(5) | length }}",
    "date": "{{ strftime_now('%Y' * 100000) }}",
}


# Each of a and b is an object that holds another twice, and so on, sixty deep.
DEEP = (
    "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% endfor %}"
)
WALKS = {
    "equal": "{{ ns.a == ns.b }}",
    "unequal": "{{ 1 if ns.a != ns.b else 2 }}",
    "chained": "{{ [0] <= ns.a < ns.b }}",
    "in a list": "{{ ns.a in [ns.b] }}",
    "not in a list": "{{ ns.a not in [1, ns.b] }}",
    "in what a filter gives": "{{ ns.a in ([ns.b] | map('default')) }}",
    "in an object's values": "{{ ns.a in {'b': ns.b}.values() }}",
    "test of equality": "{{ ns.a is eq(ns.b) }}",
    "test of order": "{{ ns.a is lt(ns.b) }}",
    "test of presence": "{{ ns.a is in([ns.b]) }}",
    "test of its text": "{{ ns.a is lower }}",
    "selected by equality": "{{ [ns.a] | select('equalto', ns.b) | list }}",
    "selected by an attribute": "{{ [{'a': ns.a}] | selectattr('a', '==', ns.b) | list }}",
    "sorted": "{{ [ns.a, ns.b] | sort }}",
    "greatest": "{{ [ns.a, ns.b] | max }}",
    "least of what a filter gives": "{{ [ns.a, ns.b] | map('default') | min }}",
    "unique": "{{ [ns.t] | unique | list }}",
    "grouped": "{{ [{'a': ns.a}, {'a': ns.b}] | groupby('a') }}",
    "sorted by value": "{{ {'x': ns.a, 'y': ns.b} | dictsort(by='value') }}",
    "index of": "{{ [ns.a].index(ns.b) }}",
    "count of": "{{ [ns.a].count(ns.b) }}",
    "changed": "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "key": "{{ {ns.t: 1} }}",
    "looked up": "{{ {}[ns.t] }}",
    "looked up by get": "{{ {}.get(ns.t) }}",
    "item of a list": "{{ [1][ns.t].x }}",
    "an object of pairs": "{{ dict([(ns.t, 1)]) }}",
    "less": "{{ {}.keys() - [ns.t] }}",
    "raised": "{{ raise_exception(ns.a) }}",
    "attribute": "{{ 1 | attr(ns.a) }}",
    **{
        f"to {name}": f"{{{{ ns.a | {name} }}}}"
        for name in ("upper", "title", "trim", "safe", "escape", "striptags", "wordcount", "indent")
    },
}


@pytest.mark.parametrize("source", WALKS.values(), ids=WALKS)
def test_nothing_that_takes_for_ever_to_walk_is_walked(source: str) -> None:
    """Python does it in one go, in which no thread runs and no clock is read."""
    with pytest.raises(ChatTemplateError, match="walks more than"):
        CompiledTemplate(DEEP + source).render({})


def test_what_is_small_enough_is_compared_and_looked_up() -> None:
    source = (
        "{{ m == n }}{{ m in [n] }}{{ 'a' in m }}{{ [m].index(n) }}{{ m is eq(n) }}"
        "{{ {(1,): 2}[k] }}{{ [3, 1] | sort }}{{ 3 - 1 }}"
        "{{ 2 in [1, 2] | map('int') }}{{ dict([(k, 1)]) | length }}"
    )
    variables = {"m": {"a": [1]}, "n": {"a": [1]}, "k": (1,)}
    assert CompiledTemplate(source).render(variables) == "TrueTrueTrue0True2[1, 3]2True1"


def test_a_long_error_is_told_in_part() -> None:
    source = "{{ raise_exception(x) }}"
    with pytest.raises(ChatTemplateError) as raised:
        CompiledTemplate(source).render({"x": "y" * 1_000_000})
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_rendering_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.2)
    started = time.thread_time()
    with pytest.raises(ChatTemplateError):
        CompiledTemplate(source).render({})
    assert time.thread_time() - started < at_most(4.0)  # unbounded they take minutes


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).__base__.__subclasses__() }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_nothing_outside_is_reached_or_changed(source: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        text = CompiledTemplate(source).render({"messages": messages})
    except ChatTemplateError:
        text = ""
    assert "object" not in text
    assert "subclasses" not in text
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_long_honest_chat_renders() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.role + ': ' ~ (m.content | trim) %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 400}] * 400
    assert len(CompiledTemplate(source).render({"messages": messages})) > 700_000


def test_an_oversized_template_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="characters"):
        CompiledTemplate("x" * 600_000)


def test_a_template_of_too_many_parts_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ChatTemplateError, match="more than 20000 parts"):
        CompiledTemplate("{{ a == b }}" * 10_000)


def test_a_template_that_goes_on_for_ever_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.2)
    template = CompiledTemplate(HOSTILE["nested loops"])
    started = time.thread_time()
    assert not template.takes_parts
    assert template.takes_strings
    assert not template.takes_argument_strings_only
    assert not template.takes_null_alone
    assert not template.takes_null_beside_tool_calls
    assert time.thread_time() - started < at_most(0.5)  # else each asks for 0.2 s or more


def test_tojson_is_hugging_faces() -> None:
    source = "{{ x | tojson }} {{ x | tojson(indent=2, sort_keys=true) }}"
    text = CompiledTemplate(source).render({"x": {"b": "<ö>", "a": [1]}})
    assert text == '{"b": "<ö>", "a": [1]} {\n  "a": [\n    1\n  ],\n  "b": "<ö>"\n}'


def test_generation_tags_and_loop_controls_are_known() -> None:
    source = (
        "{% for m in x %}{% if m == 3 %}{% break %}{% endif %}"
        "{% generation %}[{{ m }}]{% endgeneration %}{% endfor %}"
    )
    assert CompiledTemplate(source).render({"x": [1, 2, 3, 4]}) == "[1][2]"
