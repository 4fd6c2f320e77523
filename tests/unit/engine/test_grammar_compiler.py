"""Constraints are compiled off the loop, once, within bounds, and a hostile one hurts nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagewire.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from pagewire.structured_output import MAX_CHOICES, StructuredOutput
from pagewire_engine import grammar_trial, structured_output
from pagewire_engine.grammar_matcher import CompiledGrammar
from pagewire_engine.structured_output import GrammarCompiler
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of

EOS, VOCAB_SIZE = 258, 259
FILES = {"tokenizer.json": byte_tokenizer().to_str().encode()}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: FILES, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


def accepts(compiler: GrammarCompiler, constraint: StructuredOutput, text: str) -> bool:
    """Whether the text is a complete output."""
    matcher = compiler.matcher(constraint).inner
    ids = ids_of(text)
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )


def refusal(compiler: GrammarCompiler, constraint: StructuredOutput) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        compiler.start(constraint).result(WAIT_S)
    assert caught.value.field == f"structured_output.{constraint.kind}"
    assert len(caught.value.message) < 700
    return caught.value


def chain(depth: int, link: dict[str, Any] | None = None) -> str:
    """A schema whose references lead from one definition to the next."""
    links = {
        f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}], **(link or {})} for n in range(depth)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": links | {f"a{depth}": {"type": "string"}}})


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            StructuredOutput(json_schema='{"properties": {"b": {"type": "integer"}, "a": {}}}'),
            ['{"b": 1, "a": [null, 1.5]}', '{"b":1}', '{\n  "b": 1\n}', "[]"],
            ['{"a": 1, "b": 2}', '{"b": "x"}', '{"b": 1} ', "{"],
        ),
        (StructuredOutput(json_object=True), ['{"x": {}}', "{}"], ["[]", "1", '{"x"}']),
        (StructuredOutput(regex="^a|b{2}$"), ["a", "bb"], ["b", "ab", "abb"]),
        (
            StructuredOutput(choice=("ja", "jaja", 'say "no"\n', "é🙂")),
            ["ja", "jaja", 'say "no"\n', "é🙂"],
            ["j", "jajaja", "ja "],
        ),
        (StructuredOutput(grammar='root ::= "(" root? ")"'), ["()", "((()))"], ["(", "()()"]),
        (StructuredOutput(grammar='start: "(" start? ")"'), ["()", "((()))"], ["(", "()()"]),
        (
            StructuredOutput(grammar='start: "call " %json {"type": "boolean"}'),
            ["call true"],
            ["call", "true"],
        ),
        (
            StructuredOutput(json_schema='{"type": "string", "format": "made-up"}'),
            ['"anything"'],
            ["5"],
        ),
        (
            StructuredOutput(
                json_schema='{"type": "integer", "not": {"multipleOf": 2}}', lenient=True
            ),
            ["2", "5"],
            ['"x"'],
        ),
    ],
    ids=lambda each: each.kind if isinstance(each, StructuredOutput) else "",
)
def test_each_kind_accepts_what_it_says(
    compiler: GrammarCompiler, constraint: StructuredOutput, good: list[str], bad: list[str]
) -> None:
    assert {text: accepts(compiler, constraint, text) for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(compiler, constraint, text) for text in bad} == dict.fromkeys(bad, False)


def test_as_many_choices_as_are_taken_can_be_followed(compiler: GrammarCompiler) -> None:
    texts = [f'option {n}\n"{n}' for n in range(MAX_CHOICES)]
    assert accepts(compiler, StructuredOutput(choice=texts), texts[77])
    assert not accepts(compiler, StructuredOutput(choice=texts), "option 9999")
    nested = StructuredOutput(choice=["a" * length for length in range(1, 700)])
    assert accepts(compiler, nested, "a" * 699)


@pytest.mark.parametrize(
    ("settings", "schema", "text"),
    [
        ({"whitespace_pattern": "[ ]*"}, {"type": "object"}, "{" + " " * 40 + "}"),
        ({"item_separator": ";"}, {"type": "array"}, "[1;2]"),
        ({"key_separator": "="}, {"type": "object"}, '{"a"=1}'),
    ],
    ids=["white space", "between items", "after names"],
)
def test_a_schema_does_not_change_what_json_is(
    compiler: GrammarCompiler, settings: dict[str, Any], schema: dict[str, Any], text: str
) -> None:
    constraint = StructuredOutput(json_schema=json.dumps(schema | {"x-guidance": settings}))
    assert not accepts(compiler, constraint, text)


@pytest.mark.parametrize(
    "schema",
    [
        "{}",
        '{"type": "object"}',
        '{"properties": {"a": {}}}',
        '{"x-guidance": {}}',
        '{"x-guidance": {"item_separator": ","}}',
    ],
)
def test_white_space_of_json_within_a_grammar_is_bounded(
    compiler: GrammarCompiler, schema: str
) -> None:
    grammar = f'start: "%json {{}}" X %json {schema} // %json {{}}\nX: /%json [{{}}]/'
    begun = "%json {}%json {{"
    constraint = StructuredOutput(grammar=grammar)
    assert accepts(compiler, constraint, begun + '\n        "a": 1}')
    for space in (" " * 3, "\n\n", "\n" + " " * 33):
        assert not accepts(compiler, constraint, begun + space + '"a": 1}')


def test_a_schema_within_a_grammar_may_ask_for_other_white_space(
    compiler: GrammarCompiler,
) -> None:
    grammar = 'start: %json {"x-guidance": {"whitespace_pattern": "_+"}}'
    assert accepts(compiler, StructuredOutput(grammar=grammar), "[___1]")


def test_white_space_between_json_tokens_is_bounded(compiler: GrammarCompiler) -> None:
    constraint = StructuredOutput(json_object=True)
    assert accepts(compiler, constraint, '{\n        "a": [\n\t1,  2]\n}')
    for text in ('{\n\n"a": 1}', '{   "a": 1}', '{"a":\n' + " " * 33 + "1}"):
        assert not accepts(compiler, constraint, text)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (StructuredOutput(json_schema="{"), "not valid JSON"),
        (StructuredOutput(json_schema="[]"), "object"),
        (StructuredOutput(json_schema='{"type": "strin"}'), "strin"),
        (StructuredOutput(json_schema='{"not": {}}'), "not"),
        (StructuredOutput(json_schema='{"minimum": 3, "maximum": 2, "type": "integer"}'), "min"),
        (StructuredOutput(json_schema="false"), "object"),
        (StructuredOutput(json_schema='{"$ref": "#"}'), "no text satisfies it"),
        (StructuredOutput(json_schema='{"$ref": "file:///etc/passwd"}'), "passwd"),
        (StructuredOutput(json_schema='{"items":' * 2000 + "{}" + "}" * 2000), "deep"),
        (StructuredOutput(json_schema='{"items":' * 101 + "{}" + "}" * 101), "deep"),
        (StructuredOutput(regex="a("), "unclosed group"),
        (StructuredOutput(regex="(?=a)b"), "look-around"),
        (StructuredOutput(grammar="start: unknown_rule"), "unknown_rule"),
        (StructuredOutput(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
        (StructuredOutput(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
        (StructuredOutput(grammar="no grammar at all"), ""),
    ],
    ids=range(16),
)
def test_what_can_not_be_compiled_is_refused_with_a_reason(
    compiler: GrammarCompiler, constraint: StructuredOutput, reason: str
) -> None:
    assert reason in refusal(compiler, constraint).message


@pytest.mark.parametrize(
    "constraint",
    [
        # Each of these ends, or stops for minutes, the process that compiles it.
        StructuredOutput(json_schema=chain(4000)),
        StructuredOutput(
            grammar="start: A0\n"
            + "\n".join(f'A{n}: A{n + 1} "a"' for n in range(8000))
            + '\nA8000: "a"'
        ),
        StructuredOutput(regex="a?" * 20000 + "a" * 20000),
    ],
    ids=["references", "terminals", "expression"],
)
def test_what_would_kill_the_engine_kills_a_trial(
    compiler: GrammarCompiler, constraint: StructuredOutput
) -> None:
    assert "simplify it" in refusal(compiler, constraint).message
    # The next one is compiled as ever.
    assert accepts(compiler, StructuredOutput(regex=f"x{constraint.kind}"), f"x{constraint.kind}")


def test_a_harmless_depth_passes(compiler: GrammarCompiler) -> None:
    nested = '{"type":"array","items":' * 95 + '{"type":"null"}' + "}" * 95
    assert accepts(compiler, StructuredOutput(json_schema=nested), "[" * 95 + "null" + "]" * 95)
    assert accepts(compiler, StructuredOutput(json_schema=chain(30)), '"x"')


def test_one_constraint_is_compiled_once_for_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(lambda: FILES, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    may_go_on, started = threading.Event(), []

    def compile_slowly(constraint: StructuredOutput) -> Any:
        started.append(constraint)
        assert may_go_on.wait(WAIT_S)
        return CompiledGrammar(None, None, ending=None)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    monkeypatch.setattr(structured_output, "_MOST_WAITING", 3)
    many = [StructuredOutput(regex=f"a{n}") for n in range(5)]
    futures = [compiler.start(constraint) for constraint in many[:3]]
    assert compiler.start(many[0]) is futures[0]
    with pytest.raises(ResourceExhaustedError) as caught:
        compiler.start(many[3])
    assert caught.value.retry_after_s
    again = compiler.start(many[4], resubmission=True)
    may_go_on.set()
    grammars = [future.result(WAIT_S) for future in [*futures, again]]
    assert compiler.start(many[0]).result(WAIT_S) is grammars[0]
    assert started == [*many[:3], many[4]]
    for bound, value in (("_MOST_LIVE", 4), ("_MOST_LIVE_BYTES", 0)):
        with monkeypatch.context() as bounded:
            bounded.setattr(structured_output, bound, value)
            with pytest.raises(ResourceExhaustedError):
                compiler.start(many[3])
    compiler.close()


def test_the_memory_of_a_grammar_is_known() -> None:
    compiler = GrammarCompiler(lambda: FILES, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    words = StructuredOutput(choice=tuple(f"some word or other, number {n}" for n in range(4000)))
    held = compiler.start(words).result(WAIT_S)
    assert held.num_bytes > 1 << 20
    small = compiler.start(StructuredOutput(regex="a")).result(WAIT_S)
    assert small.num_bytes < held.num_bytes
    compiler.close()


def test_a_trial_that_can_not_start_is_no_fault_of_the_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_trial.sys, "executable", "/bin/false")
    compiler = GrammarCompiler(lambda: FILES, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    with pytest.raises(InternalError, match="did not start"):
        compiler.start(StructuredOutput(regex="a")).result(WAIT_S)
    compiler.close()


def test_what_a_request_holds_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_MOST_KEPT", 1)
    compiler = GrammarCompiler(lambda: FILES, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    first, second = StructuredOutput(regex="a"), StructuredOutput(regex="b")
    held = compiler.start(first).result(WAIT_S)
    compiler.start(second).result(WAIT_S)
    compiled: list[StructuredOutput] = []
    monkeypatch.setattr(compiler, "_compile", compiled.append)
    compiler.matcher(first)
    assert compiler.start(first).result(WAIT_S) is held
    assert not compiled
    compiler.close()


@pytest.mark.parametrize(
    ("files", "eos_token_ids", "message"),
    [
        ({}, [EOS], "--skip-tokenizer-init"),
        (FILES, [], "end-of-sequence"),
        ({"tokenizer.json": b'{"model": {"type": "Unheard"}}'}, [EOS], "tokenizer"),
    ],
)
def test_a_model_that_serves_no_constraint_says_so(
    files: dict[str, bytes], eos_token_ids: list[int], message: str
) -> None:
    compiler = GrammarCompiler(lambda: files, vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids)
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match=message) as caught:
            compiler.start(StructuredOutput(regex="a")).result(WAIT_S)
        assert caught.value.field == "structured_output"
    compiler.close()
