"""Random outputs under a constraint, chosen token by token as a sampler does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagewire.structured_output import StructuredOutput
from pagewire_engine.grammar_matcher import CompiledGrammar, Matcher
from pagewire_engine.grammars import compiled_grammar, grammar_text, growth_of, make_vocabulary
from pagewire_engine.mask_filling import fill_masks
from pagewire_engine.token_bytes import Bits, TokenBytes
from tests.fakes.fake_engine_client import byte_tokenizer, ids_of

# Of a vocabulary of one token a byte.
EOS, VOCAB_SIZE = 258, 259
Schema = dict[str, Any]

# Those that end or repeat something, chosen more often than others.
_LIKELY = b'"}],:{[a1t'


class Grammars:
    """Compiles schemas here, without a process for trials."""

    def __init__(self) -> None:
        tokenizer_json = byte_tokenizer().to_str().encode()
        self.vocabulary = make_vocabulary(tokenizer_json, VOCAB_SIZE, [EOS])
        self.tokens = TokenBytes(self.vocabulary)

    def compiled(self, schema: Schema, *, lenient: bool = False) -> CompiledGrammar:
        return self.of(StructuredOutput(json_schema=json.dumps(schema), lenient=lenient))

    def of(self, constraint: StructuredOutput) -> CompiledGrammar:
        text = grammar_text(constraint)
        growth = growth_of(constraint, text, self.vocabulary)
        return compiled_grammar(constraint, text, self.vocabulary, self.tokens, growth=growth)

    def accepts(self, schema: Schema, value: Any) -> bool:
        ids = ids_of(json.dumps(value))
        matcher = self.compiled(schema).matcher()
        return self._goes(matcher, ids) and matcher.inner.is_accepting()

    def _goes(self, matcher: Any, ids: list[int]) -> bool:
        for token_id in ids:
            bits = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
            fill(matcher, bits)
            if not bits[token_id // 32] >> np.uint32(token_id % 32) & 1:
                return False
            matcher.advance([token_id])
        return True


def fill(matcher: Matcher, bits: Bits) -> None:
    """Writes what a matcher allows next, as a worker does.

    Args:
        matcher: a sequence's.
        bits: uint32 [ceil(vocab_size / 32)], of any content.
    """
    fill_masks([matcher], bits[None], bits.ctypes.data)


class StuckError(Exception):
    """The matcher allowed nothing."""


def walk(
    matcher: Matcher, tokens: Sequence[bytes], eos: int, seed: int, most: int = 1500
) -> bytes | None:
    """A complete output; None for one that did not end.

    Args:
        matcher: before the first token.
        tokens: the vocabulary's bytes.
        eos: the token that ends an output.
        seed: of the choices.
        most: tokens.

    Raises:
        StuckError: there was nothing to choose from.
    """
    choose = random.Random(seed)
    output = bytearray()
    size = len(tokens)
    bits = np.zeros(-(-size // 32), np.uint32)
    for _ in range(most):
        fill(matcher, bits)
        if fault := matcher.fault():
            raise StuckError(fault)
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[:size]
        allowed = [int(n) for n in np.flatnonzero(flags)]
        others = [n for n in allowed if n != eos]
        if not others or (eos in allowed and choose.random() < 0.3):
            return bytes(output)
        likely = [n for n in others if len(tokens[n]) == 1 and tokens[n] in _LIKELY]
        plain = [n for n in others if not tokens[n].isspace()] or others
        draw = choose.random()
        if likely and draw < 0.6:
            token_id = choose.choice(likely)
        else:
            # The first again and again makes items alike.
            token_id = plain[0] if draw < 0.85 else choose.choice(plain)
        output += tokens[token_id]
        matcher.advance([token_id])
    return None
