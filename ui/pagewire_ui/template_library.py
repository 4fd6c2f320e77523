"""Chat templates to begin with: those the page ships, and those that a person saved."""

from __future__ import annotations

import difflib
import html
import re
from functools import cache
from typing import Any

from pagewire_ui.assets import FOLDER

MAX_NAME = 80
MAX_SAVED = 100
MAX_CHARACTERS = 500_000
_MAX_DIFF_LINES = 4000
_CONTEXT_CHARACTERS = 60
_LINE_END = re.compile(r"\r\n|\r|\n")
OWN, SHIPPED, SAVED = "Model: ", "Built-in: ", "Saved: "


@cache
def shipped() -> dict[str, str]:
    """The page's own templates, name to source."""
    return {path.stem: path.read_text() for path in sorted(FOLDER.glob("chat_templates/*.jinja"))}


def checked(saved: Any) -> dict[str, str]:
    """What a browser kept, name to source, without what is neither."""
    if not isinstance(saved, dict):
        return {}
    pairs = [
        (name, source)
        for name, source in saved.items()
        if isinstance(name, str) and isinstance(source, str)
    ]
    return dict(pairs[:MAX_SAVED])


def named(own: dict[str, str], saved: dict[str, str]) -> dict[str, str]:
    """All templates by the name that the list shows."""
    return (
        {OWN + name: source for name, source in own.items()}
        | {SHIPPED + name: source for name, source in shipped().items()}
        | {SAVED + name: source for name, source in sorted(saved.items())}
    )


def title(chosen: str | None, source: str, templates: dict[str, str]) -> str:
    """What people call the text in the editor.

    Args:
        chosen: the name in the list that it began as.
        source: the text as it is now.
        templates: all by the name that the list shows.
    """
    if chosen not in templates:
        return "edited"
    name = chosen.partition(": ")[2]
    return name if templates[chosen] == source else f"{name} (edited)"


def with_saved(saved: dict[str, str], name: str, source: str) -> dict[str, str]:
    """The saved templates with one more, or another text for one.

    Raises:
        ValueError: the name or the text can't be saved; the message says why.
    """
    name = name.strip()
    if not name:
        raise ValueError("Give the template a name to save it.")
    if len(name) > MAX_NAME:
        raise ValueError(f"A name may have {MAX_NAME} characters.")
    if not source.strip():
        raise ValueError("The template is empty.")
    if len(source) > MAX_CHARACTERS:
        raise ValueError(f"A template may have {MAX_CHARACTERS} characters.")
    if len(saved) >= MAX_SAVED and name not in saved:
        raise ValueError(f"At most {MAX_SAVED} templates are kept; delete one.")
    return {**saved, name: source}


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
