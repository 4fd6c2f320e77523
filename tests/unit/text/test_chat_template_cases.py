"""Templates of real models render exactly as Hugging Face's reference does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire_frontend.chat_template import ChatTemplate
from pagewire_frontend.compiled_template import CompiledTemplate, compile_template
from pagewire_frontend.errors import ChatTemplateError
from pagewire_frontend.tokenizer import Tokenizer
from tests.fakes import small_tokenizers
from tests.fakes.template_clock import freeze_template_clock

CASES = Path(__file__).parents[4] / "shared" / "cases" / "chat_templates"
if not CASES.is_dir():
    pytest.skip("the reference renders are not here", allow_module_level=True)
EXPECTED = json.loads((CASES / "expected.json").read_text())
MANIFEST = {entry["file"]: entry for entry in json.loads((CASES / "manifest.json").read_text())}
FILES = sorted(EXPECTED["renders"])


# It writes the tool calls of a message whose content is none, and of no other.
SHOWS_CALLS_BESIDE_NULL_ONLY = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja"


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_template_clock(monkeypatch)


def tokenizer() -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(small_tokenizers.byte_level_json(), config)


def compiled(file: str) -> CompiledTemplate:
    return compile_template((CASES / file).read_text())


@pytest.mark.parametrize("file", FILES)
def test_variables_render_to_the_reference_or_to_its_error(file: str) -> None:
    for case, expected in EXPECTED["renders"][file].items():
        fixture = dict(EXPECTED["fixtures"][case])
        if fixture.pop("continue_final_message", False):
            continue
        variables = {
            "tools": None,
            "documents": None,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_generation_prompt": False,
            **fixture,
        }
        if "error" in expected:
            _, message = expected["error"].split(": ", 1)
            with pytest.raises(ChatTemplateError) as raised:
                compiled(file).render(variables)
            assert message in str(raised.value), case
        else:
            assert compiled(file).render(variables) == expected["ok"], case


@pytest.mark.parametrize("file", FILES)
def test_chats_render_to_the_reference(file: str) -> None:
    """Through the whole path: control tokens guarded, content and arguments in the wanted shape."""
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    for case, expected in EXPECTED["renders"][file].items():
        if "ok" not in expected or case in ("parts_gen", "tool_roundtrip_strargs"):
            continue
        fixture: dict[str, Any] = dict(EXPECTED["fixtures"][case])
        known = ("messages", "tools", "add_generation_prompt", "continue_final_message")
        extra = {name: value for name, value in fixture.items() if name not in known}
        rendered = template.render(
            fixture["messages"],
            tools=fixture.get("tools"),
            add_generation_prompt=fixture.get("add_generation_prompt", False),
            continue_final_message=fixture.get("continue_final_message", False),
            chat_template_kwargs=extra,
        )
        assert rendered.prompt == expected["ok"], case


@pytest.mark.parametrize("file", FILES)
def test_the_content_format_is_found_by_trying(file: str) -> None:
    expected = MANIFEST[file]["content_format"]
    assert compiled(file).takes_parts == (expected == "openai")


@pytest.mark.parametrize("file", FILES)
def test_parts_reach_every_template_as_it_wants_them(file: str) -> None:
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    text = "Classify this sentiment: vLLM is wonderful!"
    if MANIFEST[file]["content_format"] == "n/a":
        return
    as_parts = template.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
    assert as_parts.prompt == template.render([{"role": "user", "content": text}]).prompt
    assert text in as_parts.prompt


@pytest.mark.parametrize("file", FILES)
def test_tool_call_arguments_sent_as_a_string_render_like_an_object(file: str) -> None:
    accepted = MANIFEST[file]["tool_args_accepts"]
    assert compiled(file).takes_argument_strings_only is (file == SHOWS_CALLS_BESIDE_NULL_ONLY)
    if "dict" not in accepted:
        return
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    fixture = EXPECTED["fixtures"]["tool_roundtrip_strargs"]
    rendered = template.render(fixture["messages"], tools=fixture["tools"])
    assert rendered.prompt == EXPECTED["renders"][file]["tool_roundtrip_dictargs"]["ok"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("arguments", ["tool_roundtrip_dictargs", "tool_roundtrip_strargs"])
def test_null_content_beside_tool_calls_renders_the_calls(file: str, arguments: str) -> None:
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    fixture = EXPECTED["fixtures"][arguments]
    user, answer, result = fixture["messages"]
    messages = [user, {**answer, "content": None}, result]
    if file == SHOWS_CALLS_BESIDE_NULL_ONLY:
        prompt = template.render(messages, tools=fixture["tools"]).prompt
        assert "get_weather\n```json\n{" in prompt
        assert '"unit": "celsius"}\n```' in prompt
        return
    as_text = EXPECTED["renders"][file]["tool_roundtrip_dictargs"]
    if "error" in as_text:
        with pytest.raises(ChatTemplateError):
            template.render(messages, tools=fixture["tools"])
        return
    assert template.render(messages, tools=fixture["tools"]).prompt == as_text["ok"]


@pytest.mark.parametrize("file", FILES)
def test_null_content_without_tool_calls_renders_as_empty_text_or_as_the_template_says(
    file: str,
) -> None:
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    user = {"role": "user", "content": "Hello, how are you?"}

    def render(content: str | None) -> str:
        answer = {"role": "assistant", "content": content}
        return template.render([user, answer, user], add_generation_prompt=True).prompt

    if "ok" not in EXPECTED["renders"][file]["system_multi_gen"]:
        return
    with_null = render(None)
    assert "None" not in with_null
    assert "null" not in with_null
    if file != SHOWS_CALLS_BESIDE_NULL_ONLY:
        assert with_null == render("")


@pytest.mark.parametrize("file", FILES)
def test_what_clients_may_leave_out_of_tools_and_calls_is_no_error(file: str) -> None:
    template = ChatTemplate({"default": (CASES / file).read_text()}, tokenizer())
    user = {"role": "user", "content": "hi"}
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": ""}}
    empty = {"role": "assistant", "content": "x", "tool_calls": []}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}

    def renders(messages: list[dict[str, Any]], **fields: Any) -> bool:
        tool = {"type": "function", "function": {"name": "f", **fields}}
        try:
            template.render(messages, tools=[tool])
        except ChatTemplateError:
            return False
        return True

    whole = {"description": "d", "parameters": {"type": "object", "properties": {}}}
    if renders([user], **whole):
        assert renders([user])
        assert renders([user], description=None, parameters=None)
        assert renders([user], parameters={"type": "object", "properties": None})
        assert renders([user, empty])
    call["function"] = {"name": "f", "arguments": "{}"}
    if renders([user, calling], **whole):
        call["function"] = {"name": "f", "arguments": ""}
        assert renders([user, calling], **whole)
