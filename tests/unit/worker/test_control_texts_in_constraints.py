"""A constraint may hold the text of a control token: it is written in plain tokens, never by the
control token, which would end the output or open a turn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from pagewire.structured_output import StructuredOutput
from pagewire_engine.structured_output import GrammarCompiler
from tests.fakes.constrained_walks import fill
from tests.fakes.fake_engine_client import byte_tokenizer
from tests.fakes.small_tokenizers import sentencepiece_files

VOCABULARIES = {
    "byte level": (
        byte_tokenizer().to_str().encode(),
        "<|im_end|>",
        ["<|im_end|>", "<|im_start|>"],
    ),
    "SentencePiece": (sentencepiece_files()["tokenizer.json"], "</s>", ["</s>", "<s>"]),
}


def constraints(text: str) -> dict[str, tuple[StructuredOutput, str]]:
    quoted = json.dumps(text)
    escaped = "".join(f"\\{char}" if char == "|" else char for char in text)
    return {
        "choice": (StructuredOutput(choice=(text,)), text),
        "regex": (StructuredOutput(regex=f"a{escaped}b"), f"a{text}b"),
        "grammar": (StructuredOutput(grammar=f"start: {quoted}"), text),
        "const": (StructuredOutput(json_schema=json.dumps({"const": text})), quoted),
        "pattern": (
            StructuredOutput(json_schema=json.dumps({"type": "string", "pattern": f"^{escaped}$"})),
            quoted,
        ),
        "member": (
            StructuredOutput(
                json_schema=json.dumps(
                    {
                        "type": "object",
                        "properties": {text: {"type": "null"}},
                        "required": [text],
                        "additionalProperties": False,
                    }
                )
            ),
            f"{{{quoted}:null}}",
        ),
    }


@pytest.mark.parametrize("kind", [*constraints("x")])
@pytest.mark.parametrize("vocabulary", [*VOCABULARIES])
def test_the_text_of_a_control_token_is_written_in_plain_tokens(vocabulary: str, kind: str) -> None:
    tokenizer_json, end, controls = VOCABULARIES[vocabulary]
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    size, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id(end)
    special = {n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert {tokenizer.token_to_id(text) for text in controls} <= special
    compiler = GrammarCompiler(
        lambda: {"tokenizer.json": tokenizer_json}, vocab_size=size, eos_token_ids=[eos]
    )
    try:
        for text in controls:
            constraint, expected = constraints(text)[kind]
            matcher = compiler.matcher(constraint)
            output: list[int] = []
            # Without the token for the end, which is the only control token that is ever allowed.
            while True:
                bits = np.zeros(-(-size // 32), np.uint32)
                fill(matcher, bits)
                assert matcher.fault() is None
                flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]
                allowed = {int(n) for n in np.flatnonzero(flags)}
                if eos in allowed:
                    assert matcher.inner.is_accepting()
                    break
                assert not allowed & special
                chosen = max(
                    (n for n in allowed if not written([n], compiler).isspace()),
                    key=lambda n: len(written([n], compiler)),
                )
                output.append(chosen)
                matcher.advance([chosen])
            assert written(output, compiler) == expected.encode()
            assert len(output) > 1
    finally:
        compiler.close()


def written(output: list[int], compiler: GrammarCompiler) -> bytes:
    assert compiler._vocabulary is not None
    return compiler._vocabulary.decode_bytes(output)
