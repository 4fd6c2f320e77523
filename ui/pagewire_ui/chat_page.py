"""The chat page: a conversation, the sampling controls beside it, counts beneath it; and, where the
server allows it, a look at the engine."""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from pagewire_ui.chat_client import REASONING_TAGS, ChatClient, ChatProgress, ChatSettings
from pagewire_ui.engine_view import CSS as ENGINE_CSS
from pagewire_ui.engine_view import draw
from pagewire_ui.engine_watch import EngineWatch

Message = dict[str, Any]

_ENGINE_REFRESH_S = 1.0

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
)
_CSS = """
.gradio-container { max-width: none !important; }
#conversation { border-width: 0 !important; }
#conversation .bubble-wrap { max-width: 56rem; margin: 0 auto; width: 100%; }
#tabs.alone > .tab-wrapper { display: none; }
#tabs:not(.alone) #conversation { height: calc(100vh - 215px) !important; }
#conversation .placeholder { text-align: center; }
#status, #message { max-width: 56rem; margin: 0 auto; width: 100%; }
.sidebar .form { background: transparent; border: none; box-shadow: none; }
.sidebar input[type="text"], .sidebar textarea, .sidebar input[type="number"] {
  border: 1px solid var(--border-color-primary); }
#head h1 { margin: 0 0 .1rem; font-size: 1.35rem; }
#head p { margin: 0; color: var(--body-text-color-subdued); }
#status { min-height: 1.5rem; font-size: .85rem; color: var(--body-text-color-subdued); }
#status .problem { color: var(--error-text-color); background: var(--error-background-fill);
  border: 1px solid var(--error-border-color); border-radius: var(--radius-md);
  padding: .5rem .75rem; }
#message { border: 1px solid var(--border-color-primary); border-radius: var(--radius-xl);
  padding: .35rem .35rem .35rem .6rem; box-shadow: 0 1px 4px rgb(0 0 0 / 6%); }
#message textarea { border: none; box-shadow: none; background: transparent; }
"""
# On a phone the controls would cover the conversation.
_CLOSE_CONTROLS_ON_A_PHONE = """() => {
  if (window.innerWidth < 768) document.querySelector(".sidebar.open .toggle-button")?.click();
}"""
_PLACEHOLDER = "## How can I help?\nYour messages go to the model on this server, and nowhere else."
_ENDINGS = {
    "stop": "",
    "length": "stopped at the token limit",
    "cancelled": "stopped by you",
    "error": "",
}


class ChatPage:
    """Draws the page and answers its events; one object serves all visitors."""

    def __init__(self, client: ChatClient, watch: EngineWatch) -> None:
        self._client = client
        self._watch = watch
        # The stop signal of each visitor's running answer, by Gradio's session.
        self._running: dict[str, asyncio.Event] = {}

    def build(self) -> gr.Blocks:
        """The Gradio page."""
        page: gr.Blocks
        with gr.Blocks(
            title="pagewire chat", analytics_enabled=False, fill_height=True, fill_width=True
        ) as page:
            with gr.Sidebar(width=300):
                head = gr.HTML(_head(None), elem_id="head")
                new_chat = gr.Button("New chat", elem_id="new-chat")
                system_prompt = gr.Textbox(
                    label="System prompt",
                    lines=3,
                    placeholder="You are a helpful assistant.",
                    elem_id="system-prompt",
                )
                temperature = gr.Slider(
                    0, 2, value=0.7, step=0.05, label="Temperature", elem_id="temperature"
                )
                top_p = gr.Slider(0.05, 1, value=0.95, step=0.05, label="Top p", elem_id="top-p")
                # Text boxes, because an empty number box reads as 0.
                max_tokens = gr.Textbox(
                    label="Max tokens",
                    value="512",
                    placeholder="as long as the model can",
                    elem_id="max-tokens",
                )
                seed = gr.Textbox(label="Seed", placeholder="a new one each time", elem_id="seed")
            with gr.Tabs(elem_id="tabs", elem_classes="alone") as tabs:
                with gr.Tab("Chat", id="chat") as chat_tab:
                    chat = gr.Chatbot(
                        elem_id="conversation",
                        show_label=False,
                        layout="bubble",
                        height="calc(100vh - 165px)",
                        placeholder=_PLACEHOLDER,
                        buttons=["copy"],
                        reasoning_tags=[REASONING_TAGS],
                        allow_file_downloads=False,
                    )
                    status = gr.HTML("", elem_id="status")
                    box = gr.Textbox(
                        show_label=False,
                        container=False,
                        placeholder="Message the model. Enter sends, Shift+Enter makes a new line.",
                        lines=1,
                        max_lines=8,
                        autofocus=True,
                        submit_btn=True,
                        stop_btn=False,
                        elem_id="message",
                    )
                with gr.Tab("Engine", id="engine-tab", visible=False) as engine_tab:
                    engine = gr.HTML("", elem_id="engine")
            clock = gr.Timer(2.0)
            engine_clock = gr.Timer(_ENGINE_REFRESH_S, active=False)

            private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
            controls = [system_prompt, temperature, top_p, max_tokens, seed]
            gr.on(
                [box.submit],
                self._send,
                inputs=[box, chat, *controls],
                outputs=[box, chat, status],
                concurrency_limit=None,
                trigger_mode="once",
                **private,
            )
            box.stop(self._stop, queue=False, **private)
            new_chat.click(self._new_chat, outputs=[chat, status], queue=False, **private)
            # Until the server answers; then the clock stops.
            page.load(None, js=_CLOSE_CONTROLS_ON_A_PHONE, **private)
            found = [head, clock, tabs, engine_tab]
            page.load(self._look_for_model, outputs=found, queue=False, **private)
            clock.tick(self._look_for_model, outputs=found, queue=False, **private)
            # The engine is looked at only while somebody looks.
            shown = [engine, engine_clock]
            engine_tab.select(self._show_engine, outputs=shown, queue=False, **private)
            engine_clock.tick(self._draw_engine, outputs=[engine], queue=False, **private)
            chat_tab.select(_leave_engine, outputs=[engine_clock], queue=False, **private)
            page.unload(self._stop)
        return page

    async def _send(
        self,
        text: str,
        history: list[Message],
        system_prompt: str,
        temperature: float,
        top_p: float,
        max_tokens: str,
        seed: str,
        request: gr.Request,
    ) -> AsyncIterator[tuple[Any, Any, Any]]:
        if not text.strip():
            yield gr.skip(), gr.skip(), gr.skip()
            return
        try:
            settings = ChatSettings(
                system_prompt,
                temperature,
                top_p,
                _whole_number("Max tokens", max_tokens),
                _whole_number("Seed", seed),
            )
        except ValueError as error:
            yield gr.skip(), gr.skip(), _problem(str(error))
            return
        asked = [*history, {"role": "user", "content": text}]
        stop = self._running[request.session_hash or ""] = asyncio.Event()
        yield _busy_box(), [*asked, {"role": "assistant", "content": "…"}], _note("Thinking …")
        progress = ChatProgress()
        answers = self._client.answer(_turns(asked), settings, stop)
        try:
            async for progress in answers:
                if progress.text and not progress.is_over:
                    yield gr.skip(), _answered(asked, progress), _note(_counts(progress))
        finally:
            await answers.aclose()  # type: ignore[attr-defined]  # an async generator
            if self._running.get(request.session_hash or "") is stop:
                del self._running[request.session_hash or ""]
        note = _problem(progress.error) if progress.error else _note(_counts(progress))
        if progress.text:
            yield _idle_box(""), _answered(asked, progress), note
        else:
            # Nothing came: the message goes back into the box, ready to be sent again.
            yield _idle_box(text), history, note

    async def _stop(self, request: gr.Request) -> None:
        if stop := self._running.get(request.session_hash or ""):
            stop.set()

    async def _new_chat(self, request: gr.Request) -> tuple[list[Message], str]:
        await self._stop(request)
        return [], ""

    async def _look_for_model(self) -> tuple[str, gr.Timer, Any, Any]:
        name = await self._client.model_name()
        allowed = await self._watch.is_allowed() if name is not None else None
        waits = name is None or allowed is None
        return (
            _head(name),
            gr.Timer(active=waits),
            gr.Tabs(elem_classes="" if allowed else "alone"),
            gr.Tab(visible=bool(allowed)),
        )

    async def _draw_engine(self) -> str:
        return draw(await self._watch.look())

    async def _show_engine(self) -> tuple[str, gr.Timer]:
        return await self._draw_engine(), gr.Timer(active=True)


def _leave_engine() -> gr.Timer:
    return gr.Timer(active=False)


def _whole_number(label: str, text: str) -> int | None:
    """The number in a text box; None where it is empty."""
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{label} must be a whole number, or empty.") from None


def _turns(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message["role"], _plain(message["content"])) for message in messages]


def _plain(content: Any) -> str:
    """The text of a message as Gradio hands it back: text, or a list of text parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")


def _answered(asked: list[Message], progress: ChatProgress) -> list[Message]:
    return [*asked, {"role": "assistant", "content": progress.text}]


def _busy_box() -> Any:
    return gr.Textbox(value="", submit_btn=False, stop_btn=True)


def _idle_box(text: str) -> Any:
    return gr.Textbox(value=text, submit_btn=True, stop_btn=False)


def _head(model: str | None) -> str:
    line = html.escape(model) if model else "Waiting for the model server …"
    return f"<h1>pagewire</h1><p>{line}</p>"


def _counts(progress: ChatProgress) -> str:
    parts = [f"{progress.num_tokens} tokens"]
    if (rate := progress.tokens_per_s) is not None:
        parts.append(f"{rate:.1f} tok/s")
    if progress.first_token_s is not None:
        parts.append(f"first token after {progress.first_token_s:.2f} s")
    if progress.num_prompt_tokens:
        parts.append(f"prompt {progress.num_prompt_tokens} tokens")
    if ending := _ENDINGS.get(progress.reason, ""):
        parts.append(ending)
    return " · ".join(parts)


def _note(text: str) -> str:
    return html.escape(text)


def _problem(text: str) -> str:
    return f'<div class="problem" role="alert">{html.escape(text)}</div>'


def theme() -> gr.Theme:
    """The page's colours and fonts."""
    return _THEME


def css() -> str:
    """The page's own style sheet."""
    return _CSS + ENGINE_CSS
