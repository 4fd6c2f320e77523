"""The tab "Engine": the queues, the blocks and the last step, for as long as somebody looks."""

from __future__ import annotations

from typing import Any

import gradio as gr

from pagewire_ui.engine_view import draw
from pagewire_ui.engine_watch import EngineWatch

_REFRESH_S = 1.0
_LABEL = "Engine"


class EngineTab:
    """Draws what the watch sees; one object serves all visitors."""

    def __init__(self, watch: EngineWatch) -> None:
        self._watch = watch

    def build(self, tabs: gr.Tabs, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            tabs: where it goes.
            private: arguments of every event.
        """
        with gr.Tab(_LABEL, id="engine-tab"):
            picture = gr.HTML("", elem_id="engine")
            clock = gr.Timer(_REFRESH_S, active=False)
        # A page that shows another tab asks nothing.
        tabs.select(self._switched, outputs=[picture, clock], queue=False, **private)
        clock.tick(self._draw, outputs=[picture], queue=False, **private)

    async def _switched(self, event: gr.SelectData) -> tuple[Any, gr.Timer]:
        if event.value != _LABEL:
            return gr.skip(), gr.Timer(active=False)
        return await self._draw(), gr.Timer(active=True)

    async def _draw(self) -> str:
        return draw(await self._watch.look())
