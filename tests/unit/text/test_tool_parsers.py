"""Tool calls come out of a text the same, however it is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_frontend.config import ReasoningParserName, ToolCallParserName
from pagewire_frontend.reasoning import REASONING_FORMATS
from pagewire_frontend.tool_parsers import TOOL_PARSERS
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.forced import NamedCallParser, RequiredCallsParser
from pagewire_frontend.tool_parsers.values import types_of


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"count": {"type": "integer"}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", location={"type": "string"}, unit={"enum": ["celsius"]}),
    tool(
        "edit",
        path={"type": "string"},
        lines={"type": "array"},
        force={"type": "boolean"},
        count={"$ref": "#/$defs/count"},
        note={"type": ["string", "null"]},
        ratio={"anyOf": [{"type": "number"}, {"type": "null"}]},
        free={},
    ),
    tool("now"),
]
WEATHER = ("get_weather", {"location": 'Zürich 🌧 "x"\n', "unit": "celsius"})
WEATHER_JSON = json.dumps(WEATHER[1], ensure_ascii=False)
NOW: tuple[str, dict[str, Any]] = ("now", {})
NOW_TEXT = ("now", "{}")
EDIT = (
    "edit",
    {
        "path": "a < b\n</function>\n  é",
        "lines": [1, {"a": None}],
        "force": True,
        "count": 3,
        "note": None,
        "ratio": 1.5,
        "free": 7,
    },
)
PARSERS: dict[str, type[ToolParser]] = {
    **TOOL_PARSERS,
    "required": RequiredCallsParser,
    "named": NamedCallParser,
}
XML_EDIT = (
    "<function=edit>\n<parameter=path>\na < b\n</function>\n  é\n</parameter>\n"
    '<parameter=lines>\n[1, {"a": null}]\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n'
    "<parameter=count>\n3\n</parameter>\n<parameter=note>\nNone\n</parameter>\n"
    "<parameter=ratio>1.5</parameter><parameter=free>\n7\n</parameter>\n</function>"
)
DS_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class Case:
    parser: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str = ""


def a_call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CASES = {
    "hermes": Case(
        "hermes",
        f"Let me look.\n<tool_call>\n{a_call('get_weather', WEATHER_JSON)}\n</tool_call>\n"
        f"<tool_call>\n{a_call('now', '{}')}\n</tool_call>\n",
        [WEATHER, NOW],
        "Let me look.",
    ),
    "hermes, arguments first": Case(
        "hermes",
        f'<tool_call>{{"arguments": {WEATHER_JSON}, "name": "get_weather"}}</tool_call>',
        [WEATHER],
    ),
    "hermes, arguments in a string": Case(
        "hermes",
        f"<tool_call>{a_call('get_weather', json.dumps(WEATHER_JSON))}</tool_call>",
        [WEATHER],
    ),
    "hermes, no arguments": Case(
        "hermes", '<tool_call>{"name": "now"}</tool_call> and more', [NOW], " and more"
    ),
    "hermes, arguments in an empty string": Case(
        "hermes", "<tool_call>" + a_call("now", '""'), [NOW]
    ),
    "hermes, an end that is cut off": Case(
        "hermes", f"<tool_call>\n{a_call('now', '{}')}\n</tool_ca", [NOW]
    ),
    "functionary, an end that is cut off": Case("functionary", "<function=now>{}</funct", [NOW]),
    "deepseek, an end that is cut off": Case(
        "deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call", [NOW]
    ),
    "hermes, a bracket too many": Case(
        "hermes", f"<tool_call>\n{a_call('get_weather', WEATHER_JSON)}}}\n</tool_call>", [WEATHER]
    ),
    "hermes, a bracket missing": Case(
        "hermes", '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>', [NOW]
    ),
    "hermes, no closing tags": Case(
        "hermes",
        f"<tool_call>{a_call('get_weather', WEATHER_JSON)}<tool_call>{a_call('now', 'null')}",
        [WEATHER, NOW],
    ),
    "hermes, raw line ends in strings": Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"location": "a\nb\t"}}</tool_call>',
        [("get_weather", {"location": "a\nb\t"})],
    ),
    "hermes, several in a block": Case(
        "hermes",
        f"<tool_call>\n{a_call('get_weather', WEATHER_JSON)}\n{a_call('now', '{}')}, "
        f"[{a_call('now', '{}')}]\n</tool_call>\n<tool_call>{a_call('now', '{}')}</tool_call>",
        [WEATHER, NOW, NOW, NOW],
    ),
    "hermes, a block's rest that is no call": Case(
        "hermes", f"<tool_call>{a_call('now', '{}')}, {{1}}</tool_call>", [NOW], ", {1}"
    ),
    "functionary": Case(
        "functionary",
        f"Sure.<function=get_weather>{WEATHER_JSON}</function><function=now>{{}}</function>",
        [WEATHER, NOW],
        "Sure.",
    ),
    "llama3_json": Case(
        "llama3_json", a_call("get_weather", WEATHER_JSON, "parameters"), [WEATHER]
    ),
    "llama3_json, several": Case(
        "llama3_json",
        f"\n<|python_tag|>{a_call('get_weather', WEATHER_JSON)}; {a_call('now', '{}')}",
        [WEATHER, NOW],
    ),
    "llama3_json, type first": Case(
        "llama3_json", '{"type": "function", "name": "now", "parameters": {}}', [NOW]
    ),
    "mistral, a list": Case(
        "mistral",
        f'[TOOL_CALLS] [{a_call("get_weather", WEATHER_JSON)}, {{"name": "now", "arguments": {{}}, '
        '"id": "abcdefghi"}]',
        [WEATHER, NOW],
    ),
    "mistral, objects without a list": Case(
        "mistral",
        f"[TOOL_CALLS]{a_call('get_weather', WEATHER_JSON)}\n{a_call('now', '{}')} [1] is no call",
        [WEATHER, NOW],
        " [1] is no call",
    ),
    "mistral, names": Case(
        "mistral",
        f"Well:[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{WEATHER_JSON}[TOOL_CALLS]now[ARGS]{{}}",
        [WEATHER, NOW],
        "Well:",
    ),
    "mistral, names without [ARGS]": Case("mistral", "[TOOL_CALLS]now{}", [NOW]),
    "firefunction": Case(
        "firefunction",
        f"Sure: functools[{a_call('get_weather', WEATHER_JSON)}, {a_call('now', '{}')}]",
        [WEATHER, NOW],
        "Sure:",
    ),
    "deepseek v3.1": Case(
        "deepseek",
        "Hm.<｜tool▁calls▁begin｜>"
        + DS_CALL.format(f"get_weather<｜tool▁sep｜>{WEATHER_JSON}")
        + DS_CALL.format("now<｜tool▁sep｜>{}")
        + "<｜tool▁calls▁end｜>",
        [WEATHER, NOW],
        "Hm.",
    ),
    "deepseek v3": Case(
        "deepseek",
        "<｜tool▁calls▁begin｜>"
        + DS_CALL.format(f"function<｜tool▁sep｜>get_weather\n```json\n{WEATHER_JSON}\n```")
        + "\n"
        + DS_CALL.format("function<｜tool▁sep｜>now\n```json\n{}\n```")
        + "<｜tool▁calls▁end｜>",
        [WEATHER, NOW],
    ),
    "qwen3_coder": Case(
        "qwen3_coder",
        f"I edit.\n<tool_call>\n{XML_EDIT}\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [EDIT, NOW],
        "I edit.",
    ),
    "qwen3_coder, an integer with a point": Case(
        "qwen3_coder",
        "<function=edit><parameter=count>3.0</parameter><parameter=ratio>2.0</parameter>"
        "</function>",
        [("edit", {"count": 3, "ratio": 2.0})],
    ),
    "qwen3_coder, ends of arguments left out": Case(
        "qwen3_coder",
        "<tool_call>\n<function=edit>\n<parameter=path>\na\n<parameter=count>\n3\n"
        "<parameter=free>\n<parameter=note>\nx\n\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("edit", {"path": "a", "count": 3, "free": "", "note": "x\n"}), NOW],
    ),
    "qwen3_coder, ends of argument and function left out": Case(
        "qwen3_coder",
        "<tool_call>\n<function=edit>\n<parameter=force>\ntrue\n</tool_call>",
        [("edit", {"force": True})],
    ),
    "qwen3_coder, tags of the format in a value": Case(
        "qwen3_coder",
        "<function=edit><parameter=path>\ntype <parameter=x>\n  <parameter=y>\n</function>;\n"
        "<parameter=\n</tool_call> is an end\n</parameter>\n</function>",
        [
            (
                "edit",
                {
                    "path": "type <parameter=x>\n  <parameter=y>\n</function>;\n"
                    "<parameter=\n</tool_call> is an end"
                },
            )
        ],
    ),
    "seed_oss, an end of an argument left out": Case(
        "seed_oss",
        "<seed:tool_call>\n<function=edit>\n<parameter=path>a\n<parameter=count>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        [("edit", {"path": "a", "count": 3})],
    ),
    "qwen3_coder, no outer tag": Case("qwen3_coder", f"{XML_EDIT}\n</tool_call>", [EDIT]),
    "seed_oss": Case("seed_oss", f"<seed:tool_call>\n{XML_EDIT}\n</seed:tool_call>", [EDIT]),
    "glm45": Case(
        "glm45",
        '<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>Zürich 🌧 "x"\n\n'
        "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>celsius</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>",
        [WEATHER, NOW],
    ),
    "pythonic": Case(
        "pythonic",
        '[get_weather(location=\'Zürich 🌧 "x"\\n\', unit="celsius"), edit(path="a < b\\n'
        "</function>\\n  é\", lines=[1, {'a': None}], force=true, count=3, note=None, ratio=1.5,"
        "free=7), now()]",
        [WEATHER, EDIT, NOW],
    ),
    "pythonic, values that are no literals": Case(
        "pythonic",
        '[edit(count=2*3, path = len("ab)") , lines=[n for n in range(3)], free={1: 2}), now()]',
        [
            (
                "edit",
                {
                    "count": "2*3",
                    "path": 'len("ab)")',
                    "lines": "[n for n in range(3)]",
                    "free": "{1: 2}",
                },
            ),
            NOW,
        ],
    ),
    "pythonic, strings in three quotes": Case(
        "pythonic",
        '[edit(path="""a, "b") \\"""\n""", note="", free="""\'x\', y"""), now()]',
        [("edit", {"path": 'a, "b") """\n', "note": "", "free": "'x', y"}), NOW],
    ),
    "pythonic, Llama 4's control tokens": Case(
        "pythonic", "<|python_start|>[now(), now()]<|python_end|>", [NOW, NOW]
    ),
    "pythonic, control tokens": Case(
        "pythonic", "I see.<|tool_call_start|>[now()]<|tool_call_end|>", [NOW], "I see."
    ),
    "required": Case(
        "required",
        f"[{a_call('get_weather', WEATHER_JSON, 'parameters')},\n{a_call('now', '{}')}]",
        [WEATHER, NOW],
    ),
    "named": Case("named", f" {WEATHER_JSON}", [WEATHER]),
}
MARKERS = sorted({marker for parser in PARSERS.values() for marker in parser.markers()})


def parser_of(name: str, *, hides: bool = False) -> ToolParser:
    cls = PARSERS[name]
    tools = TOOLS[:1] if name == "named" else TOOLS
    return cls(tools, cls.markers() if hides else ())


def parse(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as a client puts the deltas together."""
    content, ids, calls = "", [], []
    for text, deltas in (*map(parser.feed, pieces), parser.finish()):
        content += text
        for delta in deltas:
            assert bool(delta.id) == bool(delta.name) == (delta.index == len(calls))
            if delta.name:
                calls.append((delta.name, ""))
                ids.append(delta.id)
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert len(set(ids)) == len(ids)
    assert parser.num_calls == len(calls)
    return content, calls


def cut(text: str, places: set[int]) -> list[str]:
    ends = sorted(place for place in places if place < len(text))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_the_flags_offer_what_there_is() -> None:
    # Annotated: its first argument is the Literal of what there is.
    for annotated, formats in (
        (ToolCallParserName, TOOL_PARSERS),
        (ReasoningParserName, REASONING_FORMATS),
    ):
        names = get_args(get_args(annotated)[0])
        assert set(names) == {"auto", "none", *formats}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_and_content_are_parted_whole_and_character_by_character(case: Case) -> None:
    for pieces in ([case.text], list(case.text)):
        content, calls = parse(parser_of(case.parser), pieces)
        assert content == case.content
        assert [(name, json.loads(arguments)) for name, arguments in calls] == case.calls


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_every_cut_of_every_beginning_gives_the_same(case: Case, data: st.DataObject) -> None:
    text = case.text[: data.draw(st.integers(0, len(case.text)))]
    places = data.draw(st.sets(st.integers(1, max(1, len(text)))))
    assert parse(parser_of(case.parser), cut(text, places)) == parse(parser_of(case.parser), [text])


FRAGMENTS = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from(
        ['{"name": "now"', ', "arguments": ', "{", "}", "[", "]", '"', ":", ",", "now", "(", ")"]
    ),
    st.sampled_from(
        [
            "get_weather",
            "location",
            "=",
            "'a'",
            "1",
            "'",
            '"""',
            "*",
            "[now(",
            "[now(a=",
            "\\",
            "\n",
            " ",
            "é",
            "<",
            ">",
        ]
    ),
    st.sampled_from(
        [
            "<function=edit>\n<parameter=path>\n",
            "\n<parameter=free>",
            "\n</function>",
            "<parameter=path>",
            "</parameter>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
        ]
    ),
    st.text(max_size=4),
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40)
@given(fragments=st.lists(FRAGMENTS, max_size=12), places=st.sets(st.integers(1, 60)))
def test_no_text_fails_or_depends_on_its_cuts(
    name: str, fragments: list[str], places: set[int]
) -> None:
    text = "".join(fragments)
    whole = parse(parser_of(name), [text])
    assert parse(parser_of(name), cut(text, places)) == whole
    content, calls = whole
    if not calls:
        assert content == text
    markers = PARSERS[name].markers()
    hidden, _ = parse(parser_of(name, hides=True), cut(text, places))
    left = re.sub("|".join(map(re.escape, markers)) or "(?!)", "", text)
    assert not any(marker in hidden for marker in markers if marker not in left)


# Lines of values: tags begin none of them, or are none, or are followed by text.
LINES = st.sampled_from(
    ["", "x", "  </function>", "a <parameter=b>", "</function> x", "<parameter= x", "</tool_call>."]
)
VALUES = st.lists(LINES, max_size=4).map("\n".join)
ENDS = (
    "</function>\n{0}",
    "</function>",
    "{0}",
    "</function>\n{0}\n{1}\n<function=now></function>",
)


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss"])
@settings(max_examples=150)
@given(
    values=st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=3),
    end=st.sampled_from(ENDS),
    places=st.sets(st.integers(1, 250)),
)
def test_an_argument_ends_where_its_end_was_left_out(
    name: str, values: list[tuple[str, bool]], end: str, places: set[int]
) -> None:
    opener, closer = ("<tool_call>", "</tool_call>")
    if name == "seed_oss":
        opener, closer = ("<seed:tool_call>", "</seed:tool_call>")
    arguments = dict(zip(("path", "note", "free"), (value for value, _ in values), strict=False))
    text = f"{opener}\n<function=edit>\n"
    for argument, (value, is_closed) in zip(arguments, values, strict=True):
        text += f"<parameter={argument}>\n{value}\n" + "</parameter>\n" * is_closed
    text += end.format(closer, opener)
    content, calls = parse(parser_of(name), cut(text, places))
    assert content == ""
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("edit", arguments),
        *[NOW] * end.count("now"),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "An <tool_call> is a tag.\n"),
        ("hermes", '<tool_call>{"name": "now", "argu'),
        ("hermes", '<tool_call>{"name": 5}</tool_call> more'),
        ("hermes", '<tool_call>{"name": "get the weather", "arguments": {}}</tool_call>'),
        ("functionary", "<function=now"),
        ("llama3_json", '{"city": "Paris", "name": "now"}'),
        ("llama3_json", '{"name": "Alice", "parameters": {}}'),
        ("llama3_json", 'I call {"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] none"),
        ("firefunction", "functools are tools"),
        ("deepseek", "<｜tool▁calls▁begin｜>nothing"),
        ("qwen3_coder", "<tool_call>\n<function=now"),
        ("glm45", "<tool_call>\nnow"),
        ("pythonic", "[1, 2] is a list"),
        ("pythonic", "[unknown(a=1)]"),
    ],
)
def test_what_is_no_call_yet_is_content(name: str, text: str) -> None:
    assert parse(parser_of(name), list(text)) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', '{"a": "b'),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {"a": tru, 1}</tool_call>',
            '{"a": tru, 1}',
        ),
        ("qwen3_coder", "<function=edit><parameter=path>\nx = 1\ny", '{"path": "x = 1\\ny'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{1}", "{1}"),
    ],
)
def test_a_call_that_has_begun_stays_one_with_what_was_written(
    name: str, text: str, arguments: str
) -> None:
    (_, (call,)) = parse(parser_of(name), list(text))
    assert call[1] == arguments


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[edit(1), now()]", [("edit", "1"), NOW_TEXT]),
        ("[edit('a)', len([1]), count=2), now()]", [("edit", "'a)', len([1]), count=2"), NOW_TEXT]),
        ("[edit(count=1, **free), now()]", [("edit", '{"count": 1, **free'), NOW_TEXT]),
        ("[edit(count == 1), now()]", [("edit", "count == 1"), NOW_TEXT]),
        ("[edit(count=1, path='a b", [("edit", '{"count": 1, path=\'a b')]),
        ("[edit(count=(1", [("edit", "count=(1")]),
        (
            "<|tool_call_start|>[edit((1]<|tool_call_end|><|tool_call_start|>[now()]",
            [("edit", "(1]"), NOW_TEXT],
        ),
    ],
)
def test_pythonic_arguments_that_no_json_says_stay_as_they_are_written(
    text: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        assert parse(parser_of("pythonic"), pieces) == ("", calls)


def test_references_without_end_cost_no_time() -> None:
    many = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 200
    root = {"$defs": {"a": {"anyOf": many}, "b": {"anyOf": many}, "c": {"type": "string"}}}
    assert types_of({"anyOf": many}, root) == frozenset()
    assert types_of({"$ref": "#/$defs/c"}, root) == {"string"}
    assert types_of({"$ref": "#/$defs/none"}, root) == frozenset()


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of("hermes")
    parser.feed('<tool_call>{"name": "now", "arguments": {"a": "')
    assert [parser.feed(word)[1][0].arguments for word in ("one ", "two")] == ["one ", "two"]


def test_text_is_held_back_only_while_it_may_be_markup() -> None:
    parser = parser_of("hermes")
    assert [parser.feed(text)[0] for text in ("Hi", " ", "the", "re <", "tool", "box>")] == [
        "Hi",
        "",
        " the",
        "re",
        "",
        " <toolbox>",
    ]


def test_mistrals_ids_are_those_that_its_templates_take() -> None:
    _, deltas = parser_of("mistral").feed("[TOOL_CALLS]now[ARGS]{}")
    assert len(deltas[0].id) == 9
    assert deltas[0].id.isalnum()
