"""One chat template, compiled: rendering, errors that say where, and what the template wants."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.lexer import Lexer, Token, TokenStream, newline_re
from jinja2.parser import Parser

from pagewire_frontend.errors import ChatTemplateError
from pagewire_frontend.template_budget import BudgetExceededError, render_within_budget
from pagewire_frontend.template_sandbox import TemplateEnvironment, TemplateRefusalError

MAX_TEMPLATE_CHARACTERS = 500_000
_MAX_TOLD = 2000  # characters of an error
_environment = TemplateEnvironment()
# What a template makes of a None that it prints, as text or as JSON.
_PRINTED_NONE = re.compile(r"None|null")
# How Jinja names what is undefined: a variable, or an attribute of something.
_UNDEFINED = re.compile(
    r"^'(?P<variable>\w+)' is undefined$|has no attribute '(?P<attribute>\w+)'$"
)
# A list that the template printed as it is, in Python's or JSON's spelling.
_PART_AS_DATA = re.compile(r"""['"]type['"]: """)
_PROBE_ARGUMENTS: Any = '{"probekey": "probevalue"}'
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probekey": {"type": "string", "description": "A key."}},
            "required": ["probekey"],
        },
    },
}


class CompiledTemplate:
    """A chat template. Rendering is safe from any thread.

    Raises:
        ChatTemplateError: it does not parse; the error has line and column.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"a template may have {MAX_TEMPLATE_CHARACTERS} characters, not {len(source)}"
            )
        self.source = source
        self._is_endless = False
        try:
            self._template = _environment.from_string(source)
        except TemplateSyntaxError as error:
            line, column = _place_of_syntax_error(_environment, source, error)
            raise ChatTemplateError(
                f"the template does not parse: {error.message} (line {line}, column {column})",
                line=line,
                column=column,
            ) from None
        except (BudgetExceededError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"the template can't be compiled: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of the variables.

        Raises:
            ChatTemplateError: it refused these messages, failed, or did too much.
        """
        try:
            return render_within_budget(self._template.generate, variables)
        except TemplateRefusalError as error:
            raise ChatTemplateError(_told(error), line=_line(error), field="messages") from None
        except BudgetExceededError as error:
            raise ChatTemplateError(
                f"rendering the template was stopped: {error}", line=_line(error)
            ) from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise self._failed(error) from None
        except (AttributeError, RecursionError, MemoryError, RuntimeError) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> ChatTemplateError:
        line = _line(error)
        column = _column_of_undefined(self.source, line, error)
        where = f" (line {line}, column {column})" if column else f" (line {line})" if line else ""
        return ChatTemplateError(
            f"the template failed: {type(error).__name__}: {_told(error)}{where}",
            line=line,
            column=column,
        )

    @cached_property
    def takes_parts(self) -> bool:
        """Whether message content may be a list of parts; else it must be a string."""
        parts = [{"type": "text", "text": "probe7text"}]
        text = self._probe([{"role": "user", "content": parts}])
        return text is not None and "probe7text" in text and not _PART_AS_DATA.search(text)

    @cached_property
    def takes_strings(self) -> bool:
        """Whether message content may be a string; some templates take nothing but parts."""
        text = self._probe([{"role": "user", "content": "probe7text"}])
        return text is None or "probe7text" in text or not self.takes_parts

    @cached_property
    def takes_argument_strings_only(self) -> bool:
        """Whether a tool call's arguments must be JSON text. Most templates want an object."""
        # Some show the calls of a message only where its content is None.
        for content in ("", None):
            as_object = self._probe(_tool_conversation(content, {"probekey": "probevalue"}))
            as_text = self._probe(_tool_conversation(content, _PROBE_ARGUMENTS))
            if as_object is not None and "probevalue" in as_object:
                printed = "{'probekey'" in as_object
                return printed and as_text is not None and "probevalue" in as_text
            if as_text is not None and "probevalue" in as_text:
                return True
        return False

    @cached_property
    def takes_bare_tools(self) -> bool:
        """Whether a tool may be a name alone; some templates trip over what it leaves out."""
        probe = [{"role": "user", "content": "Probe."}]
        bare = {"type": "function", "function": {"name": "probe"}}
        return self._probe(probe, [bare]) is not None or self._probe(probe, [_PROBE_TOOL]) is None

    @cached_property
    def takes_null_beside_tool_calls(self) -> bool:
        """Whether content beside tool calls may be None; else it must be ""."""
        arguments = _PROBE_ARGUMENTS
        if not self.takes_argument_strings_only:
            arguments = {"probekey": "probevalue"}
        return self._takes_null(
            _tool_conversation(None, arguments), _tool_conversation("", arguments)
        )

    @cached_property
    def takes_null_alone(self) -> bool:
        """Whether the content of an answer without calls may be None; else it must be ""."""
        return self._takes_null(_answered_by(None), _answered_by(""))

    def _takes_null(
        self, with_null: list[dict[str, Any]], with_empty_text: list[dict[str, Any]]
    ) -> bool:
        text, reference = self._probe(with_null), self._probe(with_empty_text)
        if text is None:
            return False
        return len(_PRINTED_NONE.findall(text)) <= len(_PRINTED_NONE.findall(reference or ""))

    @property
    def knows_developer(self) -> bool:
        """Whether the template tells the role `developer` from others."""
        return "developer" in self.source

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template's code looks at tools."""
        tokens = _environment.lexer.tokeniter(self.source, None)
        return any(kind == "name" and text == "tools" for _, kind, text in tokens)

    @property
    def knows_documents(self) -> bool:
        """Whether the template looks at documents."""
        return "documents" in self.source

    def _probe(
        self, messages: list[dict[str, Any]], *choices: list[dict[str, Any]] | None
    ) -> str | None:
        for tools in choices or (None, [_PROBE_TOOL]):
            if self._is_endless:  # no need to spend its budget time and again
                return None
            try:
                return self.render(
                    {
                        "messages": messages,
                        "tools": tools,
                        "documents": None,
                        "add_generation_prompt": True,
                        "bos_token": "",
                        "eos_token": "",
                    }
                )
            except ChatTemplateError as error:
                self._is_endless = isinstance(error.__context__, BudgetExceededError)
        return None


def _answered_by(content: str | None) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "Probe again."},
    ]


def _tool_conversation(content: str | None, arguments: object) -> list[dict[str, Any]]:
    # Mistral's templates insist on ids of nine characters.
    call = {
        "id": "probe0001",
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "Probe."},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "Done."},
    ]


compile_template: Callable[[str], CompiledTemplate] = lru_cache(maxsize=32)(CompiledTemplate)


def _told(error: BaseException) -> str:
    """What the error says, which the template may have made as long as it likes."""
    text = str(error)
    return text if len(text) <= _MAX_TOLD else text[:_MAX_TOLD] + " …"


def _line(error: BaseException) -> int:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    return (frames[-1].lineno or 0) if frames else 0


def _column_of_undefined(source: str, line: int, error: Exception) -> int:
    """The 1-based column of what is undefined, where the code of its line names it once; else 0:
    Jinja tells the line of what failed only."""
    named = _UNDEFINED.search(str(error)) if isinstance(error, UndefinedError) else None
    if named is None:
        return 0
    name = named["variable"] or named["attribute"]
    source = "\n".join(newline_re.split(source)[::2])  # as the lexer has it
    places = [
        _line_and_column(source, offset)
        for offset in _PlacedTokens(_environment.lexer, source).offsets_of(name)
    ]
    columns = [column for at, column in places if at == line]
    return columns[0] if len(columns) == 1 else 0


def _place_of_syntax_error(
    environment: Environment, source: str, error: TemplateSyntaxError
) -> tuple[int, int]:
    """1-based line and column. Jinja tells the line only: the column is that at which its lexer
    gave up, or else of the token at which its parser stands, found by parsing again."""
    source = "\n".join(newline_re.split(source)[::2])  # as the lexer has it
    tokens = _PlacedTokens(environment.lexer, source)
    parser = Parser(environment, "")
    try:
        parser.stream = TokenStream(tokens.wrapped(), None, None)
        parser.parse()
    except TemplateSyntaxError:
        offset = tokens.place if tokens.failed else tokens.place_of(parser.stream.current)
        return _line_and_column(source, offset)
    # The compiler's own, such as of a filter that there is not.
    lines = source.splitlines() or [""]
    text = lines[min(error.lineno, len(lines)) - 1]
    return error.lineno, len(text) - len(text.lstrip()) + 1


class _PlacedTokens:
    """The lexer's tokens, no further than they are asked for.

    Attributes:
        place: where in the source the last one begins, or, once the next has been asked for, where
            that should begin. Comments and raw text are wrong where they begin: there the lexer
            gives up because their ends are missing.
        failed: the lexer gave up.
    """

    def __init__(self, lexer: Lexer, source: str) -> None:
        self._lexer = lexer
        self._source = source
        self._wrapped: list[tuple[Token, int]] = []
        self.place = 0
        self.failed = False

    def wrapped(self) -> Iterator[Token]:
        """The tokens as the parser takes them."""
        try:
            for token in self._lexer.wrap(self._placed()):
                self._wrapped.append((token, self.place))
                yield token
        except TemplateSyntaxError:
            self.failed = True
            raise

    def place_of(self, token: Token) -> int:
        """Where one of them begins; the source's end for the one that tells of it."""
        return next((at for one, at in self._wrapped if one is token), len(self._source))

    def offsets_of(self, name: str) -> list[int]:
        """Where code, and no text, has a name, or a string that is one."""
        return [
            self.place + (kind == "string")
            for _, kind, text in self._placed()
            if (kind == "name" and text == name) or (kind == "string" and text[1:-1] == name)
        ]

    def _placed(self) -> Iterator[tuple[int, str, str]]:
        end = 0
        for token in self._lexer.tokeniter(self._source, None):
            _, kind, text = token
            # What the lexer strips is in no token.
            self.place = max(self._source.find(text, end), end)
            yield token
            end = self.place + len(text)
            if kind not in ("comment_begin", "raw_begin"):
                self.place = end


def _line_and_column(source: str, offset: int) -> tuple[int, int]:
    before = source[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1
