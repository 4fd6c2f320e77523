"""The tab "Engine": the queues, the blocks and the last step, for as long as somebody looks."""

from __future__ import annotations

from typing import Any

import gradio as gr

from pagewire_ui.engine_view import draw
from pagewire_ui.engine_watch import EngineWatch
from pagewire_ui.shown_tab import telling_shown_tab

_REFRESH_S = 1.0
_LABEL = "Engine"


class EngineTab:
    """Draws what the watch sees; one object serves all visitors."""

    def __init__(self, watch: EngineWatch) -> None:
        self._watch = watch

    def build(self, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            private: arguments of every event.
        """
        with gr.Tab(_LABEL, id="engine-tab") as tab:
            picture = gr.HTML("", elem_id="engine")
            clock = gr.Timer(_REFRESH_S, active=False)
            shown = telling_shown_tab()
        # A page that shows another tab asks nothing.
        drawn = [picture, clock]
        tab.select(self._opened, outputs=drawn, queue=False, **private)
        clock.tick(self._draw_on, outputs=drawn, queue=False, **shown, **private)

    async def _opened(self) -> tuple[str, gr.Timer]:
        return draw(await self._watch.look()), gr.Timer(active=True)

    async def _draw_on(self, shown: str) -> tuple[Any, Any]:
        if shown != _LABEL:
            return gr.skip(), gr.Timer(active=False)
        return draw(await self._watch.look()), gr.skip()
