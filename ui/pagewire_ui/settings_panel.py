"""The settings of a chat: model, system prompt, and how tokens are chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gradio as gr

from pagewire.v1 import inference_pb2
from pagewire_ui.assets import imported
from pagewire_ui.chat_client import ChatSettings

OWN = "Model's own"
CUSTOM = "Custom"
# Temperature, top p, top k, min p, repetition, presence and frequency penalty.
PRESETS: dict[str, tuple[float, float, int, float, float, float, float]] = {
    "Balanced": (0.7, 0.95, 0, 0.0, 1.0, 0.0, 0.0),
    "Precise": (0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0),
    "Creative": (1.1, 1.0, 0, 0.05, 1.0, 0.3, 0.0),
}
DEFAULT_PRESET = "Balanced"
ALTERNATIVES = 5
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class Control:
    """One of the panel's fields.

    Attributes:
        name: as ChatSettings has it, but for "preset" and "alternatives".
        component: Gradio's.
    """

    name: str
    component: Any


class SettingsPanel:
    """Builds the controls where it is made, inside a `gr.Blocks`.

    Attributes:
        controls: all of them; events take their components as inputs, in this order.
    """

    def __init__(self) -> None:
        preset = PRESETS[DEFAULT_PRESET]
        with gr.Accordion("Settings", open=True, elem_id="settings"):
            # Custom: an adapter that was unloaded meanwhile is the server's to refuse, in words.
            self.model = gr.Dropdown(
                choices=[("base model", "")],
                value="",
                label="Model",
                allow_custom_value=True,
                elem_id="model",
            )
            system_prompt = gr.Textbox(
                label="System prompt",
                value="",
                lines=3,
                max_lines=10,
                placeholder="You are a helpful assistant.",
                elem_id="system-prompt",
            )
            self._preset = gr.Dropdown(
                [*PRESETS, OWN, CUSTOM],
                value=DEFAULT_PRESET,
                label="Sampling",
                info=f"“{OWN}” leaves all of it to the model's files.",
                elem_id="preset",
            )
            with gr.Column(elem_id="sampling") as self._sampling:
                temperature = gr.Slider(
                    0, 2, value=preset[0], step=0.05, label="Temperature", elem_id="temperature"
                )
                top_p = gr.Slider(
                    0.05, 1, value=preset[1], step=0.05, label="Top p", elem_id="top-p"
                )
            # Text boxes, because an empty number box reads as 0.
            max_tokens = gr.Textbox(
                label="Max tokens",
                value="512",
                placeholder="as long as the model can",
                elem_id="max-tokens",
            )
            seed = gr.Textbox(
                label="Seed", value="", placeholder="a new one each time", elem_id="seed"
            )
        with gr.Accordion("More sampling", open=False, elem_id="more-sampling"):
            with gr.Column() as self._more:
                top_k = gr.Slider(
                    0, 200, value=preset[2], step=1, label="Top k (0: all)", elem_id="top-k"
                )
                min_p = gr.Slider(
                    0, 0.5, value=preset[3], step=0.01, label="Min p", elem_id="min-p"
                )
                repetition = gr.Slider(1, 2, value=preset[4], step=0.05, label="Repetition penalty")
                presence = gr.Slider(-2, 2, value=preset[5], step=0.1, label="Presence penalty")
                frequency = gr.Slider(-2, 2, value=preset[6], step=0.1, label="Frequency penalty")
            stop = gr.Textbox(
                label="Stop strings",
                value="",
                lines=2,
                placeholder="one a line",
                elem_id="stop-strings",
            )
            alternatives = gr.Checkbox(
                value=True,
                label="Alternatives of each token",
                info="To look at beneath an answer (logprobs).",
                elem_id="alternatives",
            )
        self._sliders = [temperature, top_p, top_k, min_p, repetition, presence, frequency]
        self.controls = [
            Control("model", self.model),
            Control("system_prompt", system_prompt),
            Control("preset", self._preset),
            Control("temperature", temperature),
            Control("top_p", top_p),
            Control("top_k", top_k),
            Control("min_p", min_p),
            Control("repetition_penalty", repetition),
            Control("presence_penalty", presence),
            Control("frequency_penalty", frequency),
            Control("max_tokens", max_tokens),
            Control("seed", seed),
            Control("stop", stop),
            Control("alternatives", alternatives),
        ]

    @property
    def components(self) -> list[Any]:
        """What an event takes as inputs, for `values` and `read`."""
        return [control.component for control in self.controls]

    def listen(self, private: dict[str, Any]) -> None:
        """Lets a preset set the sliders, and a slider that is moved leave the preset.

        Args:
            private: arguments of every event.
        """
        shown = [self._sampling, self._more]
        self._preset.input(
            None,
            [self._preset],
            [*shown, *self._sliders],
            js=imported(
                f"settings.applyPreset(name, {json.dumps(PRESETS)}, {json.dumps(OWN)})",
                "name",
                "settings",
            ),
            **private,
        )
        gr.on(
            [slider.input for slider in self._sliders],
            None,
            outputs=[self._preset],
            js=f"() => {json.dumps(CUSTOM)}",
            **private,
        )

    def restored_on(self, event: Any, private: dict[str, Any]) -> None:
        """Lets the controls hold what the conversation kept that the page shows.

        Args:
            event: tells that another one is shown.
            private: arguments of the event.
        """
        controls = json.dumps([_kind(control) for control in self.controls])
        event(
            None,
            outputs=[*self.components, self._sampling, self._more],
            js=imported(
                f"settings.restored(chat.currentSettings(), {controls}, {json.dumps(OWN)})",
                "",
                "settings",
                "chat",
            ),
            **private,
        )

    def values(self, inputs: tuple[Any, ...]) -> dict[str, Any]:
        """The inputs of an event by name, as a conversation keeps them.

        What was never shown, as in a closed accordion, comes as None and has its first value.
        """
        return {
            control.name: control.component.value if value is None else value
            for control, value in zip(self.controls, inputs, strict=True)
        }


def read(values: dict[str, Any], chat_template: str | None = None) -> ChatSettings:
    """What the controls hold, to ask with.

    Args:
        values: by name.
        chat_template: in place of the model's own.

    Raises:
        ValueError: a text box holds what it can't mean; the message names it.
    """
    stop = [line for line in values["stop"].splitlines() if line]
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"Stop strings: at most {MAX_STOP_STRINGS}, one a line.")
    chosen: dict[str, Any] = {}
    if values["preset"] != OWN:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen = {name: values[name] for name in (*names, "presence_penalty", "frequency_penalty")}
        chosen["top_k"] = int(chosen["top_k"])
    return ChatSettings(
        system_prompt=values["system_prompt"],
        model=values["model"] or "",
        max_tokens=_whole_number("Max tokens", values["max_tokens"], least=1, most=2**31 - 1),
        seed=_whole_number("Seed", values["seed"], least=-(2**63), most=2**63 - 1),
        stop=stop,
        logprobs=ALTERNATIVES if values["alternatives"] else None,
        chat_template=chat_template,
        **chosen,
    )


def model_choices(models: list[inference_pb2.Model]) -> list[tuple[str, str]]:
    """Choices of the model's dropdown: the base model, then its adapters."""
    choices = []
    for index, model in enumerate(models):
        if not model.parent:
            choices.append((model.id, "" if index == 0 else model.id))
        else:
            choices.append((f"{model.id} (adapter of {model.parent})", model.id))
    return choices


def _kind(control: Control) -> dict[str, Any]:
    """What the control may hold, as the script `settings` checks it."""
    component = control.component
    if isinstance(component, gr.Slider):
        least, most = component.minimum, component.maximum
        return {"name": control.name, "kind": "number", "least": least, "most": most}
    if isinstance(component, gr.Checkbox):
        return {"name": control.name, "kind": "boolean"}
    if control.name == "preset":
        return {"name": control.name, "kind": "text", "choices": [*PRESETS, OWN, CUSTOM]}
    return {"name": control.name, "kind": "text"}


def _whole_number(label: str, text: str, *, least: int, most: int) -> int | None:
    """The number in a text box; None where it is empty."""
    if not text.strip():
        return None
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{label} must be a whole number, or empty.") from None
    if not least <= number <= most:
        raise ValueError(f"{label} must be between {least} and {most}, or empty.")
    return number
