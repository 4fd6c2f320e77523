"""The page: the sidebar with conversations and settings, and a tab for each view of the server."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from pagewire_ui.adapters_client import AdaptersClient
from pagewire_ui.adapters_tab import AdaptersTab
from pagewire_ui.assets import preloaded, scripted
from pagewire_ui.chat_client import ChatClient
from pagewire_ui.chat_tab import ChatTab
from pagewire_ui.compare_tab import CompareTab
from pagewire_ui.engine_tab import EngineTab
from pagewire_ui.engine_watch import EngineWatch
from pagewire_ui.frontend_link import FrontendLink
from pagewire_ui.latest import LatestAnswer
from pagewire_ui.settings_panel import SettingsPanel, model_choices
from pagewire_ui.templates_tab import TemplatesTab
from pagewire_ui.text_client import TextClient
from pagewire_ui.tokenizer_tab import TokenizerTab
from pagewire_ui.typed import made_at_once

# System fonts: the page must not ask anything of any other host.
_THEME = gr.themes.Default(
    primary_hue="indigo",
    neutral_hue="slate",
    radius_size="lg",
    font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
).set(
    block_border_width="0px",
    block_shadow="none",
    block_background_fill="transparent",
    block_background_fill_dark="transparent",
    body_background_fill="#ffffff",
    # Gradio's are too pale to be read by everybody (WCAG asks for 4.5 to 1).
    body_text_color_subdued="*neutral_500",
    body_text_color_subdued_dark="*neutral_400",
    input_placeholder_color="*neutral_500",
    input_placeholder_color_dark="*neutral_400",
    block_info_text_color="*neutral_500",
    block_label_text_color="*neutral_600",
    block_title_text_color="*neutral_600",
    # As the page's own buttons.
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_small_text_size="*text_md",
    button_cancel_background_fill="#dc2626",
    button_cancel_background_fill_hover="#b91c1c",
)
# On a phone the controls would cover the conversation.
_CLOSE_CONTROLS_ON_A_PHONE = """() => {
  if (window.innerWidth < 768) document.querySelector(".sidebar.open .toggle-button")?.click();
}"""
# As screen readers tell of tabs; Gradio's hear the Tab key alone.
_WALK_TABS_BY_ARROWS = """() => {
  document.querySelector("#tabs").onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tab = event.target.closest("[role=tab]");
    if (!step || !tab || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...tab.parentNode.querySelectorAll("[role=tab]:enabled")];
    const next = all.at((all.indexOf(tab) + step) % all.length);
    event.preventDefault();
    next.focus();
    next.click();
  };
}"""
_LOOK_FOR_MODELS_S = 2.0
# Once the model is there: adapters come and go.
_LOOK_AGAIN_S = 10.0


class Page:
    """Draws the page and answers its events; one object serves all visitors."""

    def __init__(self, link: FrontendLink) -> None:
        self._client = ChatClient(link)
        self._adapters = AdaptersClient(link)
        self._texts = TextClient(link)
        self.watch = EngineWatch(link)

    def build(self) -> gr.Blocks:
        """The Gradio page."""
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        page: gr.Blocks
        with gr.Blocks(
            title="pagewire chat", analytics_enabled=False, fill_height=True, fill_width=True
        ) as page:
            with gr.Sidebar(width=300):
                head = gr.HTML(_head(None), elem_id="head")
                scripted("conversations", elem_id="conversations")
                panel = SettingsPanel()
            chat, compare = ChatTab(self._client), CompareTab(self._client)
            adapters = AdaptersTab(self._adapters, self._client)
            with gr.Tabs(elem_id="tabs", overflow_behavior="wrap") as tabs:
                with gr.Tab("Chat", id="chat"):
                    chat.build(panel, private)
                compare.build(panel, private)
                adapters.build(private)
                TemplatesTab(self._texts).build(tabs, panel, private)
                TokenizerTab(self._texts).build(panel, private)
                EngineTab(self.watch).build(private)
            clock = gr.Timer(_LOOK_FOR_MODELS_S)
            panel.listen(private)
            page.load(None, js=preloaded(), **private)
            page.load(None, js=_CLOSE_CONTROLS_ON_A_PHONE, **private)
            page.load(None, js=_WALK_TABS_BY_ARROWS, **private)
            models = LatestAnswer("models", private)
            lists = [panel.model, *compare.models]
            models.asks([page.load, clock.tick, compare.opened, adapters.changed], self._models, [])
            models.taken_by(
                "settings", "settings.offered(told, held)", lists, [head, clock, *lists]
            )
            made_at_once(page, private)
            page.unload(chat.leave)
            page.unload(compare.leave)
        return page

    async def _models(self) -> dict[str, Any]:
        models = await self._client.models()
        if not models:
            return {"head": _head(None), "seconds": _LOOK_FOR_MODELS_S, "choices": None}
        return {
            "head": _head(models[0].id),
            "seconds": _LOOK_AGAIN_S,
            "choices": model_choices(models),
            "adapter": next((model.id for model in models if model.parent), ""),
        }


def _head(model: str | None) -> str:
    line = html.escape(model) if model else "Waiting for the model server …"
    return f"<h1>pagewire</h1><p>{line}</p>"


def theme() -> gr.Theme:
    """The page's colours and fonts."""
    return _THEME
