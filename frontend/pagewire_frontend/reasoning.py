"""Reasoning: what a model writes to itself before its answer, between two texts of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire_frontend.text_reader import Markers, Steps, TextReader


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts before and after a model's reasoning."""

    opener: str
    closer: str

    def opened_in(self, prompt: str, continued: str | None) -> bool:
        """Whether the prompt leaves the reasoning open: what the model writes is reasoning then.

        Args:
            prompt: as rendered.
            continued: the text of the final message that is continued, if one is.
        """
        if continued is not None:
            return continued.rfind(self.opener) > continued.rfind(self.closer)
        # At the very end only: elsewhere a client may have written it.
        return prompt.rstrip().endswith(self.opener)

    def closed_in(self, prompt: str) -> bool:
        """Whether the prompt ends with the end of reasoning: there is to be none."""
        return prompt.rstrip().endswith(self.closer)


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


def recognise_reasoning(chat_template: str) -> str | None:
    """The format of models with this chat template; None where it tells of no reasoning."""
    for name, format_ in REASONING_FORMATS.items():
        if format_.closer in chat_template:
            return name
    return None


def with_effort(
    variables: Mapping[str, Any] | None, reasoning_effort: str | None
) -> Mapping[str, Any] | None:
    """A template's variables with how much the model is to reason. What is set there stays.

    "none" turns reasoning off in the words of all templates that can: `enable_thinking` (Qwen,
    SmolLM, GLM), `thinking` (DeepSeek, Granite), `thinking_budget` (Seed-OSS).
    """
    if reasoning_effort is None:
        return variables
    effort: dict[str, Any] = {"reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        effort |= {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
    return effort | dict(variables or {})


class ReasoningParser:
    """Parts one answer into reasoning and the rest.

    White space around the reasoning belongs to its tags.

    Args:
        format_: the model's.
        opened: the prompt has opened the reasoning.
        begun: there is some of it in the prompt, which white space may part from what follows.

    Attributes:
        inside: the text so far ends within the reasoning.
        done: the reasoning is over, or there is none.
    """

    def __init__(
        self, format_: ReasoningFormat, *, opened: bool = False, begun: bool = False
    ) -> None:
        self._format = format_
        self._opened = opened
        self._begun = begun
        self.inside = opened
        self.done = False
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._rest: list[str] = []
        self._steps = self._parse()

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and rest that the new text settles."""
        self._reader.add(text)
        next(self._steps, None)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """What is left now that the text has ended."""
        self._reader.ended = True
        next(self._steps, None)
        return self._take()

    def _take(self) -> tuple[str, str]:
        reasoning, rest = "".join(self._reasoning), "".join(self._rest)
        self._reasoning.clear()
        self._rest.clear()
        return reasoning, rest

    def _parse(self) -> Steps[None]:
        reader = self._reader
        reader.mark()
        yield from reader.skip_space()
        # Some models open what is open already.
        if (yield from reader.one_of(self._format.opener)) or self._opened:
            self.inside = True
            if self._begun:
                reader.rewind(0)
            else:
                reader.forget()
                yield from reader.skip_space()
            yield from reader.pass_trimmed(Markers(self._format.closer), self._reasoning.append)
            reader.forget()
            self.inside, self.done = False, True
            yield from reader.skip_space()
        else:
            self.done = True
            reader.rewind(0)
        while True:
            self._rest.append(reader.rest())
            if reader.ended:
                return
            yield
