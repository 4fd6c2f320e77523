"""What is typed stays.

Gradio makes what is in a tab or an accordion when that is opened for the first time, and a frame or
two later it draws it once more with the first values: what was typed by then is lost (seen in
Gradio 6.31), much on a slow machine. So all of it is made soon after the page was opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr


def made_at_once(page: gr.Blocks, private: dict[str, Any]) -> None:
    """Has the browser make what is in tabs and accordions before anybody opens them.

    Args:
        page: when all of it is built.
        private: arguments of every event.
    """
    late = [block for block in page.blocks.values() if block.visible is True and _is_late(block)]
    made = f"() => Array({len(late)}).fill({{ __type__: 'update', visible: true }})"
    page.load(None, outputs=late, js=made, **private)


def _is_late(block: Any) -> bool:
    if isinstance(block, gr.Tab):
        return True
    return any(isinstance(each, gr.Tab | gr.Accordion) for each in _around(block))


def _around(block: Any) -> Iterator[Any]:
    while block := block.parent:
        yield block
