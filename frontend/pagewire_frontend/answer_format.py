"""How a chat's answer is taken apart: into reasoning, text and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pagewire.errors import InvalidArgumentError, PagewireError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire.structured_output import FIELD, StructuredOutput
from pagewire_frontend.answers import ToolCallDelta, openai_call_id
from pagewire_frontend.chat_template import RenderedChat
from pagewire_frontend.generation_types import TextDelta
from pagewire_frontend.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    recognise_reasoning,
)
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tool_choice import ToolChoice, ToolUse, constraint_for
from pagewire_frontend.tool_parsers import TOOL_PARSERS, recognise_tool_parser
from pagewire_frontend.tool_parsers.base import ToolParser
from pagewire_frontend.tool_parsers.forced import NamedCallParser, RequiredCallsParser

FORCED_PARSERS: dict[ToolChoice, type[ToolParser]] = {
    ToolChoice.REQUIRED: RequiredCallsParser,
    ToolChoice.NAMED: NamedCallParser,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the answer to one chat is made of.

    Attributes:
        tool_parser: reads calls; None where none are looked for.
        use: the tools.
        make_call_id: makes the calls' ids, such as the model's template takes.
        reasoning: the model's; None where none is looked for.
        reasoning_opened: the prompt leaves the reasoning open.
        reasoning_begun: some of it is in the prompt.
        include_reasoning: the client wants to see it.
        thinking_token_budget: most tokens up to the reasoning's end; None: no bound.
        reasoning_end: what is written for the model where it would go on.
        prompt_end: goes after the prompt: an end of reasoning that it opens, where there must be
            none.
        constraint: what the answer is held to, so that it calls a tool.
        shown_tokens: ids of control tokens that the parsers have to see.
        hidden: the texts of those.
    """

    tool_parser: type[ToolParser] | None = None
    use: ToolUse = field(default_factory=ToolUse)
    make_call_id: Callable[[], str] = openai_call_id
    reasoning: ReasoningFormat | None = None
    reasoning_opened: bool = False
    reasoning_begun: bool = False
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    reasoning_end: tuple[int, ...] = ()
    prompt_end: tuple[int, ...] = ()
    constraint: StructuredOutput | None = None
    shown_tokens: frozenset[int] = frozenset()
    hidden: frozenset[str] = frozenset()

    def reasoning_parser(self) -> ReasoningParser | None:
        """A new parser, for one sequence."""
        if self.reasoning is None:
            return None
        return ReasoningParser(
            self.reasoning, opened=self.reasoning_opened, begun=self.reasoning_begun
        )

    def held_to(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the constraint.

        Raises:
            InvalidArgumentError: a beam search is asked to keep to a budget or a constraint.
        """
        if params.beam_search is not None and self.thinking_token_budget is not None:
            raise InvalidArgumentError("thinking_token_budget", "can't be kept by a beam search")
        if self.constraint is None:
            return self._after_reasoning(params)
        try:
            return replace(params, structured_output=self.constraint)
        except InvalidArgumentError as error:
            self.name_constraint(error)
            raise

    def _after_reasoning(self, params: SamplingParams) -> SamplingParams:
        """The client's constraint holds from where the reasoning ends, if there is any."""
        held, reasoning = params.structured_output, self.reasoning
        if held is None or reasoning is None or held.reasoning_end is not None:
            return params
        start = None if self.reasoning_opened else reasoning.opener
        held = replace(held, reasoning_start=start, reasoning_end=reasoning.closer)
        return replace(params, structured_output=held)

    def name_constraint(self, error: BaseException) -> None:
        """An error about the constraint is one about what asked for it: a schema that is wrong is
        in the tools."""
        if self.constraint is None or not isinstance(error, PagewireError):
            return
        if error.field == FIELD:
            error.field = "tool_choice"
        elif error.field.startswith(f"{FIELD}."):
            error.field = "tools"


def answer_format(
    rendered: RenderedChat,
    tokenizer: Tokenizer,
    use: ToolUse,
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    include_reasoning: bool = True,
    thinking_token_budget: int | None = None,
    constrained: bool = False,
) -> AnswerFormat | None:
    """What to look for in the answer to a rendered chat; None for nothing.

    Args:
        rendered: the prompt.
        tokenizer: the model's.
        use: the client's tools.
        tool_call_parser, reasoning_parser: the operator's choice: a name, "none", or "auto", by the
            chat template.
        include_reasoning: pass the reasoning on.
        thinking_token_budget: of how many tokens it may be.
        constrained: the client holds the answer to a schema or the like. It begins after the
            reasoning, or at once where the prompt or the text that is continued has ended it. An
            answer that has to call a tool begins at once.

    Raises:
        InvalidArgumentError: tools are to be called, or reasoning is to be bounded, and how the
            model writes them is not known.
    """
    if tool_call_parser == "auto":
        tool_call_parser = recognise_tool_parser(rendered.template) or "none"
    own_parser = TOOL_PARSERS.get(tool_call_parser)
    parser = _tool_parser(own_parser, use)
    constraint = constraint_for(use)
    if constraint is not None and constrained:
        raise InvalidArgumentError(
            "tool_choice", "must be 'auto' or 'none' where the answer has to meet a format too"
        )
    if reasoning_parser == "auto":
        reasoning_parser = recognise_reasoning(rendered.template) or "none"
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    if thinking_token_budget is not None:
        _check_budget(thinking_token_budget, reasoning)
    if parser is None and reasoning is None:
        return None
    markers = () if parser is None else parser.markers()
    opened = False
    end: tuple[int, ...] = ()
    if reasoning is not None:
        text = f"\n{reasoning.closer}\n\n"
        end = tuple(tokenizer.encode(text, add_special_tokens=False))
        markers += (reasoning.opener, reasoning.closer)
        opened = reasoning.opened_in(rendered.prompt, rendered.continued)
    at_once = constraint is not None
    if constrained and reasoning is not None and not opened:
        at_once = rendered.continued is not None or reasoning.closed_in(rendered.prompt)
    shown = {
        token_id: marker
        for marker in markers
        if (token_id := tokenizer.token_id(marker)) in tokenizer.special_token_ids
        and token_id is not None
    }
    return AnswerFormat(
        tool_parser=parser,
        use=use,
        make_call_id=openai_call_id if own_parser is None else own_parser.make_id,
        reasoning=None if at_once else reasoning,
        reasoning_opened=opened,
        reasoning_begun=opened and rendered.continued is not None,
        include_reasoning=include_reasoning,
        thinking_token_budget=None if at_once else thinking_token_budget,
        reasoning_end=end,
        prompt_end=end if at_once and opened else (),
        constraint=constraint,
        shown_tokens=frozenset(shown),
        hidden=frozenset(shown.values()),
    )


def _check_budget(budget: int, reasoning: ReasoningFormat | None) -> None:
    if budget < 0:
        raise InvalidArgumentError("thinking_token_budget", "must be at least 0")
    if reasoning is None:
        raise InvalidArgumentError(
            "thinking_token_budget",
            "how this model marks its reasoning is not known; start the frontend with "
            "--reasoning-parser NAME, or leave the budget out",
        )


def _tool_parser(own: type[ToolParser] | None, use: ToolUse) -> type[ToolParser] | None:
    if use.choice is ToolChoice.NONE:
        return None
    if use.choice in FORCED_PARSERS:
        return FORCED_PARSERS[use.choice]
    if own is None:
        raise InvalidArgumentError(
            "tools",
            "how this model writes tool calls is not known; start the frontend with "
            "--tool-call-parser NAME (and --chat-template FILE where the model's own does not show "
            "tools), or send tool_choice 'required' or a function, which hold the answer to calls, "
            "or 'none' for text",
        )
    return own


class AnswerParser:
    """Takes one sequence of an answer apart.

    Args:
        format_: what to look for.
    """

    def __init__(self, format_: AnswerFormat) -> None:
        self._include_reasoning = format_.include_reasoning
        self._parallel = format_.use.parallel
        self._reasoning = format_.reasoning_parser()
        self._tools: ToolParser | None = None
        if format_.tool_parser is not None:
            self._tools = format_.tool_parser(
                format_.use.callable_tools,
                format_.hidden,
                format_.make_call_id,
                only_these=bool(format_.use.allowed),
            )
        # Of the last call, as far as they have come.
        self._arguments: list[str] = []

    def apply(self, delta: TextDelta) -> None:
        """Makes a delta of text one of reasoning, text and calls."""
        ended = delta.finish_reason is not None
        reasoning, text = "", delta.text
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
            if ended:
                last_reasoning, last_text = self._reasoning.finish()
                reasoning, text = reasoning + last_reasoning, text + last_text
        if self._include_reasoning:
            delta.reasoning = reasoning
        delta.text = text
        if self._tools is None:
            return
        delta.text, calls = self._tools.feed(text)
        if ended:
            last_text, last_calls = self._tools.finish()
            delta.text += last_text
            calls = _joined(calls, last_calls)
        delta.tool_calls = calls if self._parallel else [call for call in calls if not call.index]
        for call in delta.tool_calls:
            if call.name:
                self._arguments.clear()
            self._arguments.append(call.arguments)
        if (
            delta.finish_reason is FinishReason.STOP
            and self._tools.num_calls
            # A stop string or token of the client's may have cut the call: it is none to be made.
            and (delta.stop_reason is None or _is_json("".join(self._arguments)))
        ):
            delta.finish_reason = FinishReason.TOOL_CALLS


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _joined(before: list[ToolCallDelta], after: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Both, with one delta a call."""
    if before and after and before[-1].index == after[0].index:
        before[-1].arguments += after[0].arguments
        after = after[1:]
    return before + after
