"""The tab "Adapters": which are loaded, from where and how large; loading, updating, unloading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import gradio as gr

from pagewire.v1 import engine_pb2
from pagewire_ui.adapters_client import AdapterError, AdaptersClient
from pagewire_ui.adapters_view import draw, size
from pagewire_ui.chat_client import ChatClient
from pagewire_ui.notes import problem, said
from pagewire_ui.shown_tab import telling_shown_tab

LABEL = "Adapters"
_REFRESH_S = 2.0
# How often a load or an unload under way tells how it stands.
_PROGRESS_S = 0.5
_WAIT, _ABORT = "wait for its requests", "end its requests"
_Update = tuple[Any, Any, Any, Any]


class AdaptersTab:
    """Draws and changes the adapters; one object serves all visitors.

    Attributes:
        changed: the event that the table tells something else.
    """

    def __init__(self, client: AdaptersClient, chat: ChatClient) -> None:
        self._client = client
        self._chat = chat

    def build(self, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            private: arguments of every event.
        """
        with gr.Tab(LABEL, id="adapters-tab") as tab, gr.Column(elem_classes="pw-tab"):
            table = gr.HTML("", elem_id="adapters-table")
            note = gr.HTML("", elem_id="adapters-note")
            with gr.Row(elem_id="adapters-forms"):
                with gr.Column(min_width=280):
                    gr.HTML("<h2>Load or update</h2>")
                    name = gr.Textbox(label="Name", value="", elem_id="adapter-name")
                    path = gr.Dropdown(
                        [],
                        value=None,
                        allow_custom_value=True,
                        label="Folder",
                        info="In the engine's --lora-dir.",
                        elem_id="adapter-path",
                    )
                    base = gr.Textbox(
                        label="Trained on (optional)",
                        value="",
                        placeholder="the served model",
                        elem_id="adapter-base",
                    )
                    with gr.Row():
                        load = gr.Button(
                            "Load", variant="primary", size="sm", elem_id="load", min_width=80
                        )
                        update = gr.Button(
                            "Update in place", size="sm", elem_id="update", min_width=80
                        )
                with gr.Column(min_width=280):
                    gr.HTML("<h2>Unload</h2>")
                    loaded = gr.Dropdown([], value=None, label="Adapter", elem_id="unload-name")
                    mode = gr.Radio([_WAIT, _ABORT], value=_WAIT, label="First", elem_id="mode")
                    patience = gr.Slider(
                        1, 600, value=60, step=1, label="Seconds to wait", elem_id="patience"
                    )
                    unload = gr.Button("Unload", variant="stop", size="sm", elem_id="unload")
            clock = gr.Timer(_REFRESH_S, active=False)
            shown = telling_shown_tab()
        self.changed = table.change
        seen = [table, path, loaded]
        tab.select(self._opened, outputs=[clock, *seen], queue=False, **private)
        clock.tick(self._look_on, outputs=[clock, *seen], queue=False, **shown, **private)
        streamed: dict[str, Any] = {
            "outputs": [note, *seen],
            "concurrency_limit": None,
            "trigger_mode": "multiple",
            **private,
        }
        load.click(self._load, [name, path, base], **streamed)
        update.click(self._update, [name, path, base], **streamed)
        unload.click(self._unload, [loaded, mode, patience], **streamed)

    async def _opened(self) -> tuple[Any, ...]:
        return gr.Timer(active=True), *await self._look()

    async def _look_on(self, shown: str) -> tuple[Any, ...]:
        if shown != LABEL:
            return gr.Timer(active=False), *(gr.skip() for _ in range(3))
        return gr.skip(), *await self._look()

    async def _look(self) -> tuple[Any, Any, Any]:
        listing, models = await asyncio.gather(self._client.listing(), self._chat.models())
        names = [
            adapter.name
            for adapter in listing.adapters
            if adapter.state != engine_pb2.AdapterInfo.STATE_LEAVING
        ]
        return (
            draw(listing, models or []),
            gr.update(choices=listing.loadable_paths),
            gr.update(choices=list(dict.fromkeys(names))),
        )

    async def _load(self, name: str, path: str | None, base: str) -> AsyncIterator[_Update]:
        async for update in self._loading(name, path, base, in_place=False):
            yield update

    async def _update(self, name: str, path: str | None, base: str) -> AsyncIterator[_Update]:
        async for update in self._loading(name, path, base, in_place=True):
            yield update

    async def _loading(
        self, name: str, path: str | None, base: str, *, in_place: bool
    ) -> AsyncIterator[_Update]:
        name, path = (name or "").strip(), (path or "").strip()
        if not name or not path:
            yield problem("Give the adapter a name and a folder."), *await self._look()
            return
        request = engine_pb2.LoadAdapterRequest(
            name=name, path=path, base_model_name=(base or "").strip(), in_place=in_place
        )

        async def load() -> str:
            adapter = await self._client.load(request)
            verb = "Updated" if in_place else "Loaded"
            return f"{verb} {adapter.name}: rank {adapter.rank}, {size(adapter.bytes)}."

        async for update in self._told(f"Loading {name}", load()):
            yield update

    async def _unload(
        self, name: str | None, mode: str, patience_s: float
    ) -> AsyncIterator[_Update]:
        if not name:
            yield problem("Choose the adapter to unload."), *await self._look()
            return
        modes = engine_pb2.UnloadAdapterRequest
        request = engine_pb2.UnloadAdapterRequest(
            name=name,
            mode=modes.MODE_ABORT if mode == _ABORT else modes.MODE_WAIT,
            timeout_s=patience_s,
        )

        async def unload() -> str:
            answer = await self._client.unload(request)
            freed = f"{size(answer.host_bytes)} of host memory"
            if answer.device_bytes:
                freed += f" and {size(answer.device_bytes)} of the device's"
            ended = answer.num_ended_requests
            return f"Unloaded {name}: {freed} came back, {ended} requests were ended."

        async for update in self._told(f"Unloading {name}", unload()):
            yield update

    async def _told(self, doing: str, work: Coroutine[Any, Any, str]) -> AsyncIterator[_Update]:
        """Tells how work goes while it does, and how it ended. A page that is left does not end
        it: the server finishes what it was told to do."""
        task, begun = asyncio.create_task(work), time.monotonic()
        while not task.done():
            seconds = time.monotonic() - begun
            yield said(f"{doing} … {seconds:.0f} s", busy=True), *await self._look()
            await asyncio.wait({task}, timeout=_PROGRESS_S)
        try:
            told = said(task.result())
        except AdapterError as error:
            told = problem(str(error))
        yield told, *await self._look()
