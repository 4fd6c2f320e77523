"""A template is somebody else's program: it ends soon, stays small and reaches nothing."""

from __future__ import annotations

import time

import pytest

from pagewire_frontend import template_sandbox
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
    "date": "{{ strftime_now('%Y' * 100000) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_rendering_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
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
