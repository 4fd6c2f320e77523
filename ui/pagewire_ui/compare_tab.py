"""The tab "Compare": one question to two models, as a base model and an adapter, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import gradio as gr

from pagewire_ui.assets import imported, scripted
from pagewire_ui.chat_client import ChatClient, ChatProgress, ChatSettings
from pagewire_ui.chat_tab import progress_value
from pagewire_ui.settings_panel import SettingsPanel, read
from pagewire_ui.stop_signals import StopSignals

LABEL = "Compare"
_SIDES = ("left", "right")
_REDRAW_S = 0.05


class CompareTab:
    """Asks both at once; one object serves all visitors.

    Attributes:
        models: the lists to choose the two models from.
        opened: the event that the tab is shown.
    """

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._signals = StopSignals()

    def build(self, panel: SettingsPanel, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            panel: the settings that both are asked with, but for the model.
            private: arguments of every event.
        """
        self._panel = panel
        with gr.Tab(LABEL, id="compare-tab") as tab, gr.Column(elem_classes="pw-tab"):
            with gr.Row():
                # Custom: the choices come from a script, and Gradio's server knows none of them.
                left, right = (
                    gr.Dropdown(
                        [("base model", "")],
                        value="",
                        label=side.capitalize(),
                        allow_custom_value=True,
                        elem_id=f"compare-{side}",
                    )
                    for side in _SIDES
                )
            question = gr.Textbox(
                label="Question",
                lines=2,
                max_lines=8,
                placeholder="Both get this question, with the settings of the sidebar.",
                elem_id="compare-question",
            )
            with gr.Row(elem_classes="pw-buttons"):
                ask = gr.Button(
                    "Ask both", variant="primary", size="sm", elem_id="compare-ask", min_width=80
                )
                stop = gr.Button("Stop", size="sm", elem_id="compare-stop", min_width=80)
            answers = scripted("compare", elem_id="compare-answers")
            number = gr.JSON(visible=False)
        self.models = [left, right]
        self.opened = tab.select
        given = ", ".join(f"input{index}" for index in range(3 + len(panel.components)))
        gr.on(
            [ask.click, question.submit],
            self._ask,
            inputs=[number, question, left, right, *panel.components],
            outputs=[answers],
            js=imported(f"[latest.next('compare'), {given}]", f"_, {given}", "latest"),
            concurrency_limit=None,
            # Another question ends the answers to the one before.
            trigger_mode="multiple",
            **private,
        )
        stop.click(
            self._stop,
            [number],
            js=imported("[latest.last('compare')]", "_", "latest"),
            queue=False,
            trigger_mode="multiple",
            **private,
        )

    async def _ask(
        self, request: gr.Request, number: int, *inputs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        question, left, right, *values = inputs
        session = request.session_hash
        self._signals.stop_before(session, number)
        if not (question or "").strip():
            yield {"number": number, "error": "Write a question first."}
            return
        try:
            settings = read(self._panel.values(tuple(values)))
        except ValueError as error:
            yield {"number": number, "error": str(error)}
            return
        stop = self._signals.begun(session, str(number))
        models = dict(zip(_SIDES, (left or "", right or ""), strict=True))
        latest = dict.fromkeys(_SIDES, ChatProgress())
        news = asyncio.Event()

        async def follow(side: str, settings: ChatSettings) -> None:
            async for progress in self._client.answer([("user", question)], settings, stop):
                latest[side] = progress
                news.set()

        tasks = [
            asyncio.create_task(follow(side, replace(settings, model=model)))
            for side, model in models.items()
        ]
        try:
            while True:
                # Of what is shown now: one may end while it is on its way.
                over = all(progress.is_over for progress in latest.values())
                yield {"number": number} | {
                    side: {**progress_value(latest[side]), "model": models[side] or "base model"}
                    for side in _SIDES
                }
                if over:
                    return
                await news.wait()
                news.clear()
                await asyncio.sleep(_REDRAW_S)
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._signals.ended(session, str(number))

    async def _stop(self, request: gr.Request, number: int) -> None:
        self._signals.stop(request.session_hash, str(number))

    async def leave(self, request: gr.Request) -> None:
        """Ends the answers of a page that is closed."""
        self._signals.stop_all(request.session_hash)
