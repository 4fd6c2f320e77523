"""The workloads that throughput is measured on: the same token ids for every engine."""

from __future__ import annotations

import importlib
import json
import pydoc
from collections.abc import Callable
from pathlib import Path

NUM_PROMPTS = 32
NEW_TOKENS = 128
_SHORTEST, _LONGEST = 64, 256
_SKIPPED = 50  # tokens of every page that are alike
_SPARE = 60
_MODULES = """
    argparse asyncio bisect calendar collections contextlib csv dataclasses datetime decimal difflib
    email enum functools glob heapq html http imaplib inspect io itertools json logging math pathlib
    pickle random re shutil socket statistics string subprocess tempfile textwrap threading typing
    unittest urllib.parse uuid zipfile
"""
_SHIPPED = Path(__file__).parent / "data" / "prompts_cpu.json"


def cpu_prompts() -> list[list[int]]:
    """32 prompts of 64 to 256 SmolLM2 tokens, of the standard library's documentation.

    Shipped as made by `pydoc_prompts` on Python 3.11.7: other versions document other things.
    """
    prompts: list[list[int]] = json.loads(_SHIPPED.read_text())
    return prompts


def some_prompts(count: int) -> list[list[int]]:
    """`count` of the 32, spread over their lengths."""
    return cpu_prompts()[:: max(1, NUM_PROMPTS // count)][:count]


def pydoc_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The recipe: as many tokens of each module's documentation as its turn says.

    Args:
        encode: text to ids, without special tokens.
    """
    prompts: list[list[int]] = []
    for name in _MODULES.split():
        ids = encode(pydoc.plain(pydoc.render_doc(importlib.import_module(name))))
        length = _SHORTEST + round(len(prompts) * (_LONGEST - _SHORTEST) / (NUM_PROMPTS - 1))
        if len(ids) >= length + _SPARE:
            prompts.append(ids[_SKIPPED : _SKIPPED + length])
        if len(prompts) == NUM_PROMPTS:
            break
    return prompts
