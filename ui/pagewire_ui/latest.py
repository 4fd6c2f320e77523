"""Events whose answers may come late, or after the answers to later ones: the latest one counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from pagewire_ui.assets import imported


class LatestAnswer:
    """What Python said last of one thing, to be taken in by a script.

    Two halves: `asks` sends the inputs with a number, `taken_by` gets the answer in the browser, at
    the moment when it is there, with what the components hold then; answers that a newer one has
    overtaken are dropped. To be made where components may be made.

    Attributes:
        component: whose `change` tells that an answer came, overtaken or not.
    """

    def __init__(self, kind: str, private: dict[str, Any]) -> None:
        """
        Args:
            kind: a name, the page's only one.
            private: arguments of every event.
        """
        self._kind = kind
        self._private = private
        self._number = gr.JSON(visible=False)
        self.component = gr.JSON(visible=False)

    def asks(
        self,
        triggers: Sequence[Any],
        function: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        trigger_mode: str = "always_last",
        **from_scripts: str,
    ) -> None:
        """Lets Python answer events.

        Args:
            triggers: the events.
            function: a coroutine function of the inputs' values; its value must fit JSON, and None
                tells that there is nothing to say.
            inputs: components.
            trigger_mode: Gradio's.
            from_scripts: arguments after the inputs, as JavaScript: script to expression.
        """

        async def answer(number: int, *values: Any) -> Any:
            told = await function(*values)
            return gr.skip() if told is None else {"number": number, "told": told}

        names = [f"input{index}" for index in range(len(inputs))]
        numbered = f"latest.next('{self._kind}')"
        gr.on(
            list(triggers),
            answer,
            inputs=[self._number, *inputs, *[self._number] * len(from_scripts)],
            outputs=[self.component],
            js=imported(
                f"[{', '.join([numbered, *names, *from_scripts.values()])}]",
                ", ".join(["_", *names]),
                "latest",
                *from_scripts,
            ),
            queue=False,
            trigger_mode=trigger_mode,
            **self._private,
        )

    def taken_by(
        self, script: str, expression: str, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Lets a script make of the answer what the outputs hold.

        Args:
            script: its name, without folder.
            expression: JavaScript; `told` is the answer and `held` the inputs' values. Its value is
                a list, with undefined for each output that is to stay as it is.
            inputs, outputs: components.
        """
        self.component.change(
            None,
            [self.component, *inputs],
            list(outputs),
            js=imported(
                f"answer && latest.isNew('{self._kind}', answer.number) "
                "? ((told, held) => "
                f"{expression})(JSON.parse(JSON.stringify(answer.told)), held) : []",
                "answer, ...held",
                "latest",
                script,
            ),
            **self._private,
        )
