"""The tab "Tokenizer": a text as the model reads it."""

from __future__ import annotations

from typing import Any

import gradio as gr

from pagewire_ui.assets import scripted
from pagewire_ui.latest import LatestAnswer
from pagewire_ui.notes import problem
from pagewire_ui.settings_panel import SettingsPanel
from pagewire_ui.text_client import Fault, TextClient
from pagewire_ui.token_values import MAX_DRAWN, drawing

LABEL = "Tokenizer"
_EXAMPLE = "Paged attention keeps keys and values in blocks, 你好, 👋!"


class TokenizerTab:
    """Draws texts as tokens; one object serves all visitors."""

    def __init__(self, client: TextClient) -> None:
        self._client = client

    def build(self, panel: SettingsPanel, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            panel: the chat's settings, for its model.
            private: arguments of every event.
        """
        with gr.Tab(LABEL, id="tokenizer-tab") as tab, gr.Column(elem_classes="pw-tab"):
            text = gr.Textbox(
                _EXAMPLE, label="Text", lines=5, max_lines=20, elem_id="tokenizer-text"
            )
            with gr.Row():
                parse = gr.Checkbox(
                    True, label="Read control tokens in the text", elem_id="parse-control"
                )
                add = gr.Checkbox(
                    False, label="Add the tokenizer's own (a BOS)", elem_id="add-special"
                )
            count = gr.HTML("", elem_id="token-count")
            tokens = scripted("tokens", elem_id="tokenizer-tokens")
            answer = LatestAnswer("tokens", private)
        # The chat's model may have changed while the tab was hidden.
        triggers = [tab.select, text.change, parse.input, add.input, panel.model.change]
        answer.asks(triggers, self._tokenize, [text, panel.model, parse, add])
        answer.taken_by("tokens", "told", [], [tokens, count])

    async def _tokenize(
        self, text: str | None, model: str, parse: bool, add: bool
    ) -> tuple[Any, str]:
        tokens = await self._client.tokenize(
            model or "", text or "", add_special_tokens=add, parse_special_tokens=parse
        )
        if isinstance(tokens, Fault):
            return None, problem(tokens.text)
        characters = len(text or "")
        ratio = f", {characters / len(tokens):.1f} characters a token" if tokens else ""
        more = f", of which {MAX_DRAWN} are drawn" if len(tokens) > MAX_DRAWN else ""
        count = f"<p><b>{len(tokens)} tokens</b> for {characters} characters{ratio}{more}</p>"
        return drawing(tokens, "The text's tokens"), count
