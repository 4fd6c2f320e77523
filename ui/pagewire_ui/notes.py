"""What the tabs tell a person, as HTML in which all text is text."""

from __future__ import annotations

import html


def problem(text: str) -> str:
    """Something that went wrong."""
    return f'<div class="problem" role="alert">{html.escape(text)}</div>'


def said(text: str, *, busy: bool = False) -> str:
    """Something that was done, or is under way."""
    bar = '<progress aria-label="under way"></progress>' if busy else ""
    return f'<p class="pw-hint" role="status">{html.escape(text)}{bar}</p>'
