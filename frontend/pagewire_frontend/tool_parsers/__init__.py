"""The ways in which models write tool calls, by name."""

from __future__ import annotations

from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.deepseek import DeepSeekParser
from pagewire_frontend.tool_parsers.json_calls import (
    FirefunctionParser,
    FunctionaryParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
)
from pagewire_frontend.tool_parsers.pythonic import PythonicParser
from pagewire_frontend.tool_parsers.xml_calls import (
    Glm45Parser,
    Qwen3CoderParser,
    SeedOssParser,
)

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek": DeepSeekParser,
    "firefunction": FirefunctionParser,
    "functionary": FunctionaryParser,
    "glm45": Glm45Parser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
}
# What in a chat template tells how its model writes calls: the first whose texts are all there.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("firefunction", ("functools[",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("functionary", ("<function=",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("pythonic", ("List of tools: [",)),
    ("llama3_json", ('{"name": function name, "parameters": ',)),
)


def recognise_tool_parser(chat_template: str) -> str | None:
    """The parser for models with this chat template; None where it does not tell."""
    for name, signs in _SIGNS:
        if all(sign in chat_template for sign in signs):
            return name
    return None
