"""Reasoning comes apart from the answer, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_frontend.answer_format import AnswerFormat, answer_format
from pagewire_frontend.chat_template import ChatTemplate
from pagewire_frontend.reasoning import (
    REASONING_FORMATS,
    ReasoningParser,
    recognise_reasoning,
    with_effort,
)
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tool_choice import ToolUse
from pagewire_frontend.tool_parsers import recognise_tool_parser
from tests.fakes import small_tokenizers

CASES = Path(__file__).parents[4] / "shared" / "cases" / "chat_templates"
THINK = REASONING_FORMATS["think"]
USER = {"role": "user", "content": "What does <think> mean?"}


def parse(parser: ReasoningParser, pieces: Sequence[str]) -> tuple[str, str]:
    parts = [*map(parser.feed, pieces), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm, 1 < 2.\n\n</think>\n\nYes.\n", False, ("Hm, 1 < 2.", "Yes.\n")),
        ("\n<think>Hm</think>Yes", False, ("Hm", "Yes")),
        ("Hm.\n</think>\n\nYes <think>", True, ("Hm.", "Yes <think>")),
        ("<think>\nHm</think>Yes", True, ("Hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        (" Yes <think> is a tag", False, ("", " Yes <think> is a tag")),
        ("<thinking> is none", False, ("", "<thinking> is none")),
        ("Cut off </thi", True, ("Cut off </thi", "")),
        ("", True, ("", "")),
        ("", False, ("", "")),
        ("  ", False, ("", "  ")),
        ("<thi", False, ("", "<thi")),
    ],
)
def test_reasoning_and_answer_are_parted(
    text: str, opened: bool, expected: tuple[str, str]
) -> None:
    assert parse(ReasoningParser(THINK, opened=opened), [text]) == expected
    assert parse(ReasoningParser(THINK, opened=opened), list(text)) == expected


@settings(max_examples=100)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "/", "a", " ", "\n", ">"])),
    opened=st.booleans(),
    begun=st.booleans(),
)
def test_every_cut_gives_the_same(pieces: list[str], opened: bool, begun: bool) -> None:
    text = "".join(pieces)
    cut = parse(ReasoningParser(THINK, opened=opened, begun=begun), pieces)
    assert cut == parse(ReasoningParser(THINK, opened=opened, begun=begun), [text])
    assert cut == parse(ReasoningParser(THINK, opened=opened, begun=begun), list(text))


def test_space_before_the_rest_of_begun_reasoning_is_kept() -> None:
    assert parse(ReasoningParser(THINK, opened=True, begun=True), [" so </think> A"]) == (
        " so",
        "A",
    )


def test_no_effort_turns_reasoning_off_unless_the_template_is_told_otherwise() -> None:
    assert with_effort(None, None) is None
    assert with_effort({"a": 1}, "low") == {"a": 1, "reasoning_effort": "low"}
    off = with_effort({"thinking": True}, "none")
    assert off is not None
    assert off["enable_thinking"] is False
    assert off["thinking"] is True


@pytest.mark.skipif(not CASES.is_dir(), reason="the templates are not here")
@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("ByteDance-Seed-OSS", "seed_oss", "seed_oss"),
        ("GLM-4.6", "glm45", "think"),
        ("HuggingFaceTB-SmolLM3-3B", None, "think"),
        ("LFM2.5-Instruct", "pythonic", "think"),
        ("MiMo-VL", "hermes", None),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral", None),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "think"),
        ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", None),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", None),
        ("Qwen-QwQ-32B", "hermes", "think"),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes", None),
        ("Qwen-Qwen3-0.6B", "hermes", "think"),
        ("Qwen3-Coder", "qwen3_coder", None),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek", "think"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek", "think"),
        ("fireworks-ai-llama-3-firefunction-v2", "firefunction", None),
        ("google-gemma-2-2b-it", None, None),
        ("meetkai-functionary-medium-v3.1", "functionary", None),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3_json", None),
        ("meta-llama-Llama-3.3-70B-Instruct", "llama3_json", None),
        ("microsoft-Phi-3.5-mini-instruct", None, None),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral", None),
        ("unsloth-mistral-Devstral-Small-2507", "mistral", None),
    ],
)
def test_a_models_formats_are_recognised_by_its_template(
    name: str, tools: str | None, reasoning: str | None
) -> None:
    source = (CASES / f"{name}.jinja").read_text()
    assert recognise_tool_parser(source) == tools
    assert recognise_reasoning(source) == reasoning


def test_calls_with_other_names_for_their_keys_are_not_taken_for_llamas() -> None:
    # As Command R7B's template shows them.
    example = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]'
    assert recognise_tool_parser('{"name": "f", "description": ""}' + example) is None


@pytest.mark.skipif(not CASES.is_dir(), reason="the templates are not here")
@pytest.mark.parametrize(
    ("name", "variables", "opened"),
    [
        ("Qwen-Qwen3-0.6B", {}, False),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, False),
        ("Qwen-QwQ-32B", {"enable_thinking": True}, True),
        ("Qwen-QwQ-32B", {}, False),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, True),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"enable_thinking": False}, False),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", {}, True),
        ("deepseek-ai-DeepSeek-V3.1", {}, False),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("ByteDance-Seed-OSS", {"thinking_budget": 0}, False),
    ],
)
def test_the_prompt_tells_whether_the_template_opened_the_reasoning(
    name: str, variables: dict[str, Any], opened: bool
) -> None:
    answer = answer_to((CASES / f"{name}.jinja").read_text(), [USER], variables)
    assert answer.reasoning_opened is opened


def test_reasoning_that_a_message_has_begun_is_continued() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    begun = {"role": "assistant", "content": "<think>\nHm,"}
    answer = answer_to(template, [USER, begun], continue_final_message=True)
    assert answer.reasoning_opened
    assert answer.reasoning_begun
    done = {"role": "assistant", "content": "<think>\nHm</think>Well,"}
    answer = answer_to(template, [USER, done], continue_final_message=True)
    assert not answer.reasoning_opened


def answer_to(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any] | None = None,
    **arguments: Any,
) -> AnswerFormat:
    tokenizer = Tokenizer(small_tokenizers.byte_level_json(), {"bos_token": "<s>"})
    rendered = ChatTemplate({"default": template}, tokenizer).render(
        messages, chat_template_kwargs=variables, **arguments
    )
    answer = answer_format(rendered, tokenizer, ToolUse())
    assert answer is not None
    return answer
