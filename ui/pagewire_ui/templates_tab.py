"""The tab "Templates": how a conversation becomes a prompt, seen while the template is written."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from pagewire_ui import template_library as library
from pagewire_ui.assets import imported, scripted
from pagewire_ui.chat_tab import turns_of
from pagewire_ui.latest import LatestAnswer
from pagewire_ui.notes import problem
from pagewire_ui.settings_panel import SettingsPanel
from pagewire_ui.text_client import Fault, TextClient, Token
from pagewire_ui.token_values import drawing

LABEL = "Templates"
_EXAMPLE = [
    ("system", "You are a helpful assistant."),
    ("user", "What is a page table?"),
    ("assistant", "It maps virtual pages to frames of memory."),
    ("user", "And paged attention?"),
]
_EXAMPLE_NAME, _CHAT_NAME = "An example", "This chat"
_MAX_IMPORT_BYTES = 1_000_000
_ALLOW = (
    "This server takes no chat templates from requests. Start the frontend with "
    "<code>--allow-request-chat-template</code> to preview and use other templates than the "
    "model's own."
)


class TemplatesTab:
    """Answers the events of the editor; one object serves all visitors and keeps nothing of
    theirs: what they save stays in their browsers."""

    def __init__(self, client: TextClient) -> None:
        self._client = client

    def build(self, tabs: gr.Tabs, panel: SettingsPanel, private: dict[str, Any]) -> None:
        """Builds the tab.

        Args:
            tabs: where it goes.
            panel: the settings of the chat: its model and system prompt.
            private: arguments of every event.
        """
        with gr.Tab(LABEL, id="templates-tab") as tab, gr.Row(elem_classes="pw-tab"):
            with gr.Column(min_width=320):
                self._build_editor(tabs, private)
            with gr.Column(min_width=320):
                sample = gr.Radio(
                    [_EXAMPLE_NAME, _CHAT_NAME],
                    value=_EXAMPLE_NAME,
                    label="The prompt of",
                    elem_id="template-sample",
                )
                count = gr.HTML("", elem_id="prompt-count")
                preview = scripted("tokens", elem_id="prompt-preview")
                with gr.Accordion("Difference from the model's own", open=False):
                    difference = gr.HTML("", elem_id="template-diff")
                library_told = LatestAnswer("library", private)
                prompt = LatestAnswer("prompt", private)
        library_told.asks(
            [tab.select, panel.model.change], self._library, [panel.model], trigger_mode="multiple"
        )
        listed = [self._chosen, self._editor]
        library_told.taken_by(
            "templates", "templates.took(told, held)", listed, [*listed, self._note]
        )
        prompt.asks(
            # With the templates, whatever of the chat changed while the tab was hidden is seen too.
            [library_told.component.change, self._editor.change, sample.input],
            self._preview,
            [self._editor, panel.model, sample, panel.components[1]],
            chat="chat.currentTurns()",
        )
        prompt.taken_by("tokens", "told", [], [preview, count, self._fault, difference])

    def _build_editor(self, tabs: gr.Tabs, private: dict[str, Any]) -> None:
        chosen = gr.Dropdown([], label="Template", elem_id="template-choice")
        editor = gr.Code(
            language="jinja2",
            label="Jinja template",
            lines=14,
            max_lines=28,
            wrap_lines=True,
            elem_id="template-editor",
            buttons=["copy"],
        )
        self._fault = gr.HTML("", elem_id="template-problem")
        with gr.Row():
            use = gr.Button(
                "Use for this chat",
                size="sm",
                variant="primary",
                elem_id="use-template",
                min_width=80,
            )
            restore = gr.Button("Restore", size="sm", elem_id="restore-template", min_width=80)
        with gr.Row():
            name = gr.Textbox(
                show_label=False,
                placeholder="Name",
                elem_id="template-name",
                max_length=library.MAX_NAME,
                container=False,
                min_width=100,
            )
            save = gr.Button("Save", size="sm", elem_id="save-template", min_width=80)
            delete = gr.Button("Delete", size="sm", elem_id="delete-template", min_width=80)
        with gr.Row():
            take_in = gr.Button("Import file", size="sm", elem_id="import-template", min_width=80)
            export = gr.Button("Export file", size="sm", elem_id="export-template", min_width=80)
        note = gr.HTML("", elem_id="template-note")
        self._chosen, self._editor, self._note = chosen, editor, note
        choice = "templates.chose(chosen)", [chosen], [editor, name]
        for event, (expression, inputs, outputs) in (
            (chosen.input, choice),
            (restore.click, choice),
            (save.click, ("templates.save(name, source)", [name, editor], [chosen, note])),
            (delete.click, ("templates.remove(chosen)", [chosen], [chosen, note])),
            (
                take_in.click,
                (f"templates.importFile({_MAX_IMPORT_BYTES})", [], [editor, name, note]),
            ),
            (export.click, ("templates.exportFile(source, name)", [editor, name], [])),
            (use.click, ("templates.useForChat(chosen, source)", [chosen, editor], [tabs, note])),
        ):
            parameters = {chosen: "chosen", editor: "source", name: "name"}
            named = ", ".join(parameters[each] for each in inputs)
            event(None, inputs, outputs, js=imported(expression, named, "templates"), **private)

    async def _library(self, model: str) -> dict[str, Any]:
        own = await self._client.templates(model or "")
        if isinstance(own, Fault):
            return {"templates": None, "note": problem(own.text)}
        hint = "" if own.others_allowed else f'<p class="pw-hint" role="note">{_ALLOW}</p>'
        return {"templates": library.named(own.sources), "note": hint}

    async def _preview(
        self, source: str | None, model: str, sample: str, system_prompt: str | None, turns: Any
    ) -> tuple[Any, str, str, Any]:
        own = await self._client.templates(model or "")
        if isinstance(own, Fault):
            return None, "", problem(own.text), gr.skip()
        source = source or ""
        names = library.names_of(source, own.sources)
        difference = library.difference(own.sources.get("default", ""), source)
        if not source.strip():
            return None, "", problem("The template is empty."), difference
        tokens = await self._client.prompt(
            model or "", _turns(sample, system_prompt, turns), names[0] if names else source
        )
        if isinstance(tokens, Fault):
            return None, "", _fault(tokens, source), difference
        return drawing(tokens, "The prompt's tokens"), _count(tokens), "", difference


def _turns(sample: str, system_prompt: str | None, turns: Any) -> list[tuple[str, str]]:
    if sample == _EXAMPLE_NAME:
        return _EXAMPLE
    try:
        chat = turns_of(turns)
    except ValueError:
        chat = []
    if chat and chat[-1][0] == "assistant":
        chat = chat[:-1]  # the prompt that its last answer was made from
    head = [("system", system_prompt)] if system_prompt and system_prompt.strip() else []
    return [*head, *(chat or [("user", "…")])]


def _count(tokens: list[Token]) -> str:
    control = sum(token.is_control for token in tokens)
    return f"<p><b>{len(tokens)} tokens</b>, {control} of them control tokens</p>"


def _fault(fault: Fault, source: str) -> str:
    where = ""
    if fault.line:
        column = f", column {fault.column}" if fault.column else ""
        where = (
            f"<p>Line {fault.line}{column}</p>{library.excerpt(source, fault.line, fault.column)}"
        )
    return f'<div class="problem" role="alert">{html.escape(fault.text)}{where}</div>'
