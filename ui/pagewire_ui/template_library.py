"""Chat templates to begin with, and what can be told of one that is being written."""

from __future__ import annotations

import difflib
import html
import re
from functools import cache

from pagewire_ui.assets import FOLDER

_MAX_DIFF_LINES = 4000
_CONTEXT_CHARACTERS = 60
_LINE_END = re.compile(r"\r\n|\r|\n")
MAX_NAME = 80
_OWN, _SHIPPED = "Model: ", "Built-in: "


@cache
def shipped() -> dict[str, str]:
    """The page's own templates, name to source."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("chat_templates/*.jinja"))}


def named(own: dict[str, str]) -> dict[str, str]:
    """The model's templates and the page's, by the name that the list shows."""
    return {_OWN + name: source for name, source in own.items()} | {
        _SHIPPED + name: source for name, source in shipped().items()
    }


def names_of(source: str, own: dict[str, str]) -> list[str]:
    """Names of the model's templates with this text, whatever their line ends: an editor has its
    own."""
    lines = _LINE_END.split(source)
    return [name for name, text in own.items() if _LINE_END.split(text) == lines]


def excerpt(source: str, line: int, column: int) -> str:
    """The line at fault as HTML, with a mark beneath the column where that is known."""
    # Jinja's own line ends, and no others that Unicode knows.
    lines = _LINE_END.split(source)
    text = lines[min(line, len(lines)) - 1]
    start = max(0, column - _CONTEXT_CHARACTERS) if column else 0
    shown = text[start : start + 2 * _CONTEXT_CHARACTERS].replace("\t", " ")
    mark = f"\n{' ' * (len(str(line)) + 3 + column - 1 - start)}^" if column else ""
    return f"<pre>{html.escape(f'{line} | {shown}{mark}')}</pre>"


def difference(own: str, source: str) -> str:
    """HTML of the lines in which a template differs from the model's own."""
    if own == source:
        return '<p class="pw-hint">It is the model\'s own template.</p>'
    before, after = own.splitlines(), source.splitlines()
    if len(before) + len(after) > _MAX_DIFF_LINES:
        return '<p class="pw-hint">The templates are too long to be compared here.</p>'
    rows = [
        _row(line)
        for line in difflib.unified_diff(before, after, lineterm="", n=3)
        if not line.startswith(("---", "+++"))
    ]
    if not rows:
        return '<p class="pw-hint">They differ in line ends only.</p>'
    return f'<pre class="pw-diff" tabindex="0" aria-label="Differences">{"".join(rows)}</pre>'


def _row(line: str) -> str:
    tag, kind = {"+": ("ins", "added"), "-": ("del", "removed"), "@": ("span", "place")}.get(
        line[:1], ("span", "same")
    )
    return f'<{tag} class="{kind}">{html.escape(line)}\n</{tag}>'
