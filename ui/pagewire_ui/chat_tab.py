"""The tab "Chat": a conversation that lives in the browser, and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from pagewire_ui.assets import scripted
from pagewire_ui.chat_client import ChatClient, ChatProgress
from pagewire_ui.settings_panel import SettingsPanel, read
from pagewire_ui.stop_signals import StopSignals
from pagewire_ui.token_values import with_alternatives

_ROLES = ("user", "assistant")
Value = dict[str, Any]


class ChatTab:
    """Answers the events of the conversation; one object serves all visitors, and keeps nothing of
    theirs but the stop signals of answers that are on their way."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._signals = StopSignals()

    def build(self, panel: SettingsPanel, private: dict[str, Any]) -> None:
        """Builds the tab's content, inside a `gr.Tab`.

        Args:
            panel: the settings to ask with.
            private: arguments of every event.
        """
        self._panel = panel
        room: Any = scripted("chat", ("ask", "halt", "opened"), elem_id="chat-room")
        room.ask(
            self._ask,
            inputs=panel.components,
            outputs=[room],
            concurrency_limit=None,
            trigger_mode="multiple",
            **private,
        )
        room.halt(self._halt, queue=False, trigger_mode="multiple", **private)
        panel.restored_on(room.opened, private)

    async def _ask(
        self, event: gr.EventData, request: gr.Request, *inputs: Any
    ) -> AsyncIterator[Value]:
        answer_id = str(event.answer)
        values = self._panel.values(inputs)
        try:
            turns = turns_of(event.turns)
            settings = read(values, _text_or_none(event.template))
        except ValueError as error:
            yield {
                **progress_value(ChatProgress(is_over=True, error=str(error))),
                "answer": answer_id,
            }
            return
        about = {"answer": answer_id, "model": settings.model}
        stop = self._signals.begun(request.session_hash, answer_id)
        answers = self._client.answer(turns, settings, stop)
        try:
            yield {**progress_value(ChatProgress()), **about, "settings": values}
            async for progress in answers:
                yield {**progress_value(progress), **about}
        finally:
            await answers.aclose()  # type: ignore[attr-defined]  # an async generator
            self._signals.ended(request.session_hash, answer_id)

    async def _halt(self, event: gr.EventData, request: gr.Request) -> None:
        self._signals.stop(request.session_hash, str(event.answer))

    async def leave(self, request: gr.Request) -> None:
        """Ends the answers of a page that was closed."""
        self._signals.stop_all(request.session_hash)


def turns_of(value: Any) -> list[tuple[str, str]]:
    """(role, text) pairs of what a browser sent.

    Raises:
        ValueError: it is no list of turns.
    """
    try:
        turns = [(turn["role"], turn["text"]) for turn in value]
    except (TypeError, KeyError):
        raise ValueError("The page sent no conversation; reload it.") from None
    for role, text in turns:
        if role not in _ROLES or not isinstance(text, str):
            raise ValueError("The page sent a message of no known kind; reload it.")
    return turns


def progress_value(progress: ChatProgress) -> Value:
    """An answer so far, as the scripts draw it; its tokens only at its end."""
    value: Value = {
        "text": progress.text,
        "reasoning": progress.reasoning,
        "tokens": progress.num_tokens,
        "prompt_tokens": progress.num_prompt_tokens,
        "cached_tokens": progress.num_cached_tokens,
        "first_token_s": progress.first_token_s,
        "rate": progress.tokens_per_s,
        "reason": progress.reason,
        "over": progress.is_over,
        "error": progress.error,
    }
    if progress.is_over:
        value["details"] = [with_alternatives(position) for position in progress.details]
    return value


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
