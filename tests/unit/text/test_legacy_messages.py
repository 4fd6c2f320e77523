"""Function calls in earlier messages reach chat templates as tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.errors import InvalidArgumentError
from pagewire_frontend.chat_messages import prepare_messages
from pagewire_frontend.compiled_template import compile_template

# It shows calls as most templates do, with arguments that are objects.
TEMPLATE = compile_template(
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }} {{ m.name }}>{% endif %};{% endfor %}"
)


def called(name: str, arguments: Any = '{"a": 1}', **more: Any) -> dict[str, Any]:
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "function_call": call, **more}


def answered(name: str | None, content: str) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"role": "function", "content": content, **named}


def rendered(*messages: dict[str, Any]) -> str:
    prepared = prepare_messages(list(messages), TEMPLATE)
    assert all("function_call" not in message for message in prepared)
    return TEMPLATE.render({"messages": prepared})


def test_a_call_and_its_answer_become_those_of_a_tool() -> None:
    user = {"role": "user", "content": "Q"}
    assert rendered(user, called("f"), answered("f", "9")) == (
        "user:Q;assistant:[call00001 f a=1];tool:9<call00001 f>;"
    )


def test_each_answer_goes_with_the_last_call_of_its_name() -> None:
    text = rendered(
        called("f"), called("g"), answered("f", "1"), answered("g", "2"), called("f"),
        answered("f", "3"), answered(None, "4"),
    )  # fmt: skip
    assert [part for part in text.split(";") if part.startswith("tool")] == [
        "tool:1<call00000 f>", "tool:2<call00001 g>", "tool:3<call00004 f>", "tool:4<call00006 >"
    ]  # fmt: skip


def test_an_answer_without_a_name_goes_with_the_last_call() -> None:
    text = rendered(called("f"), called("g"), answered(None, "1"))
    assert text.endswith("tool:1<call00001 >;")


def test_an_answer_to_no_call_has_an_id_all_the_same() -> None:
    assert rendered(answered("f", "1")) == "tool:1<call00000 f>;"


def test_what_is_null_beside_a_call_is_no_other_call() -> None:
    assert "[call00000 f a=1]" in rendered(called("f", tool_calls=None))
    assert "[call00000 f a=1]" in rendered(called("f", tool_calls=[]))
    assert rendered({"role": "assistant", "content": "x", "function_call": None}) == "assistant:x;"


def test_the_clients_messages_stay_as_they_are() -> None:
    messages = [called("f"), answered("f", "1")]
    prepare_messages(messages, TEMPLATE)
    assert messages == [called("f"), answered("f", "1")]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (called("f", "{"), "function_call.arguments"),
        ({"role": "assistant", "function_call": "f"}, "function_call"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call"),
        ({"role": "assistant", "function_call": {"name": 7}}, "function_call"),
        (
            called("f", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
            "function_call",
        ),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        prepare_messages([{"role": "user", "content": "Q"}, message], TEMPLATE)
    assert raised.value.field == f"messages[1].{field}"
