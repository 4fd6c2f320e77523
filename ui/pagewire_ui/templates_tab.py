"""The tab "Templates": how a conversation becomes a prompt, seen while the template is written."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from pagewire_ui import template_library as library
from pagewire_ui.assets import imported, scripted
from pagewire_ui.chat_tab import turns_of
from pagewire_ui.notes import problem, said
from pagewire_ui.settings_panel import SettingsPanel
from pagewire_ui.text_client import Fault, OwnTemplates, TextClient, Token
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

    def build(
        self,
        tabs: gr.Tabs,
        panel: SettingsPanel,
        saved: gr.BrowserState,
        private: dict[str, Any],
    ) -> None:
        """Builds the tab.

        Args:
            tabs: where it goes.
            panel: the settings of the chat: its model and system prompt.
            saved: the person's own templates; made outside of the tabs, for what is in a tab is
                there only once that was shown.
            private: arguments of every event.
        """
        with gr.Tab(LABEL, id="templates-tab") as tab, gr.Row(elem_classes="pw-tab"):
            # What a request says to use this template: a name of the model's, or the text.
            argument = gr.Textbox(visible=False)
            # What people call it.
            title = gr.Textbox(visible=False)
            turns = gr.JSON(visible=False)
            with gr.Column(min_width=320):
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
                fault = gr.HTML("", elem_id="template-problem")
                with gr.Row():
                    use = gr.Button(
                        "Use for this chat", size="sm", variant="primary", elem_id="use-template"
                    )
                    restore = gr.Button("Restore", size="sm", elem_id="restore-template")
                with gr.Row():
                    name = gr.Textbox(
                        show_label=False,
                        placeholder="Name to save it by",
                        elem_id="template-name",
                        max_length=library.MAX_NAME,
                        container=False,
                    )
                    save = gr.Button("Save", size="sm", elem_id="save-template", min_width=80)
                    delete = gr.Button("Delete", size="sm", elem_id="delete-template", min_width=80)
                with gr.Row():
                    take_in = gr.Button("Import file", size="sm", elem_id="import-template")
                    export = gr.Button("Export file", size="sm", elem_id="export-template")
                note = gr.HTML("", elem_id="template-note")
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
        tab.select(
            self._opened,
            [panel.model, saved, chosen, editor],
            [chosen, editor, note],
            queue=False,
            **private,
        )
        chosen.input(
            self._chosen, [chosen, panel.model, saved], [editor, name], queue=False, **private
        )
        inputs = [editor, panel.model, sample, panel.components[1], turns, chosen, saved]
        drawn = [preview, count, fault, difference, argument, title]
        with_turns = imported(
            "chat",
            "[source, model, sample, system, script.currentTurns(), chosen, saved]",
            "source, model, sample, system, turns, chosen, saved",
        )
        live: dict[str, Any] = {"js": with_turns, "trigger_mode": "always_last", "queue": False}
        gr.on([editor.change, sample.input], self._preview, inputs, drawn, **live, **private)
        # The chat, its model or its system prompt may have changed while the tab was hidden.
        tab.select(self._preview_again, inputs, drawn, js=with_turns, queue=False, **private)
        # The browser tells what it kept some time after the page was opened, maybe after the tab.
        saved.change(
            self._choices_again, [saved, panel.model, chosen], [chosen], queue=False, **private
        )
        restore.click(
            self._chosen, [chosen, panel.model, saved], [editor, name], queue=False, **private
        )
        kept = [saved, chosen, note]
        save.click(self._save, [saved, panel.model, name, editor], kept, queue=False, **private)
        delete.click(self._delete, [saved, panel.model, chosen], kept, queue=False, **private)
        take_in.click(
            None,
            [editor, name],
            [editor, name, note],
            js=imported(
                "templates", f"script.importFile(source, name, {_MAX_IMPORT_BYTES})", "source, name"
            ),
            **private,
        )
        export.click(
            None,
            [editor, name],
            js=imported("templates", "script.exportFile(source, name)", "source, name"),
            **private,
        )
        use.click(
            _go_to_chat,
            [title, argument],
            [tabs],
            js=imported("templates", "script.useForChat(title, argument)", "title, argument"),
            queue=False,
            **private,
        )

    async def _own(self, model: str) -> OwnTemplates | Fault:
        return await self._client.templates(model or "")

    async def _opened(
        self, model: str, saved: Any, chosen: str | None, source: str | None
    ) -> tuple[Any, Any, Any]:
        own = await self._own(model)
        if isinstance(own, Fault):
            return gr.skip(), gr.skip(), problem(own.text)
        choices = library.named(own.sources, library.checked(saved))
        first = next(iter(choices))
        hint = "" if own.others_allowed else f'<p class="pw-hint" role="note">{_ALLOW}</p>'
        keeps = chosen in choices and source
        return (
            gr.update(choices=list(choices), value=chosen if keeps else first),
            gr.skip() if keeps else choices[first],
            hint,
        )

    async def _chosen(self, chosen: str | None, model: str, saved: Any) -> tuple[Any, Any]:
        own = await self._own(model)
        sources = {} if isinstance(own, Fault) else own.sources
        source = library.named(sources, library.checked(saved)).get(chosen or "")
        if source is None:
            return gr.skip(), gr.skip()
        is_saved = (chosen or "").startswith(library.SAVED)
        return source, (chosen or "").removeprefix(library.SAVED) if is_saved else ""

    async def _preview(
        self,
        source: str | None,
        model: str,
        sample: str,
        system_prompt: str | None,
        turns: Any,
        chosen: str | None,
        saved: Any,
    ) -> tuple[Any, str, str, Any, str, str]:
        own = await self._own(model)
        if isinstance(own, Fault):
            return None, "", problem(own.text), gr.skip(), "", ""
        source = source or ""
        names = [name for name, text in own.sources.items() if text == source]
        argument = names[0] if names else source
        default = own.sources.get("default", "")
        difference = library.difference(default, source)
        if not source.strip():
            return None, "", problem("The template is empty."), difference, "", ""
        title = library.title(chosen, source, library.named(own.sources, library.checked(saved)))
        tokens = await self._client.prompt(
            model or "", _turns(sample, system_prompt, turns), argument
        )
        if isinstance(tokens, Fault):
            return None, "", _fault(tokens, source), difference, argument, title
        drawn = drawing(tokens, "The prompt's tokens")
        return drawn, _count(tokens), "", difference, argument, title

    async def _preview_again(self, *inputs: Any) -> Any:
        if not inputs[0]:
            return (gr.skip(),) * 6
        return await self._preview(*inputs)

    async def _save(
        self, saved: Any, model: str, name: str | None, source: str | None
    ) -> tuple[Any, Any, str]:
        try:
            kept = library.with_saved(library.checked(saved), name or "", source or "")
        except ValueError as error:
            return gr.skip(), gr.skip(), problem(str(error))
        chosen = library.SAVED + (name or "").strip()
        return kept, await self._choices(model, kept, chosen), said("Saved in this browser.")

    async def _delete(self, saved: Any, model: str, chosen: str | None) -> tuple[Any, Any, str]:
        kept = library.checked(saved)
        name = (chosen or "").removeprefix(library.SAVED)
        if not (chosen or "").startswith(library.SAVED) or name not in kept:
            return gr.skip(), gr.skip(), problem("Only saved templates can be deleted.")
        del kept[name]
        return kept, await self._choices(model, kept, None), said(f"Deleted {name}.")

    async def _choices_again(self, saved: Any, model: str, chosen: str | None) -> Any:
        return await self._choices(model, library.checked(saved), chosen) if chosen else gr.skip()

    async def _choices(self, model: str, saved: dict[str, str], chosen: str | None) -> Any:
        own = await self._own(model)
        choices = library.named({} if isinstance(own, Fault) else own.sources, saved)
        value = chosen if chosen in choices else next(iter(choices))
        return gr.update(choices=list(choices), value=value)


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


def _go_to_chat(title: str, argument: str) -> Any:
    return gr.Tabs(selected="chat") if argument else gr.skip()


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
