"""Which tab a page shows, told with the ticks of a clock.

Answers to the switches between tabs can cross each other: a clock that one switch starts and
another stops may be left running, or standing. So each tab's own select starts its clock, and the
ticks stop it, once the page shows another tab.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

_LABEL_OF_IT = """() => [
  document.querySelector("#tabs [role=tab][aria-selected=true]")?.textContent.trim() ?? ""]"""


def telling_shown_tab() -> dict[str, Any]:
    """Arguments of a clock's `tick`, whose function gets the label of the tab that is shown. To be
    called where components may be made."""
    return {"inputs": [gr.Textbox(visible=False)], "js": _LABEL_OF_IT}
