"""The bodies of OpenAI's requests, with pagewire's extensions.

Types are strict: a wrong type is refused as OpenAI does, by name. Fields that nobody here knows are
ignored, since clients send many; fields that are known and not served are refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import MAX_LOGPROBS, SamplingParams, check_count, check_range
from pagewire_frontend.generation_types import MAX_PROMPTS
from pagewire_frontend.openai_api.field_types import Integers, Objects
from pagewire_frontend.openai_api.legacy_functions import LEGACY_NAMES, legacy_tool_use
from pagewire_frontend.openai_api.sampling_body import SamplingBody
from pagewire_frontend.openai_api.unsupported import IN_CHATS, IN_COMPLETIONS, Refused
from pagewire_frontend.tool_choice import ToolDefinition, ToolUse, tool_use

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {
    "description": "A text, several texts, token ids, or several lists of them.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ],
}


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    refused: ClassVar[Refused] = IN_COMPLETIONS

    # Checked in `prompts`: pydantic's union would collect an error for each of 100,000 token ids.
    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether the prompt alone is wanted back (echo with max_tokens=0), be it without log
        probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def completion_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`sampling_params` with this endpoint's defaults.

        Raises:
            InvalidArgumentError: a value that can't be served.
        """
        changes: dict[str, Any] = {}
        if self.logprobs is not None:
            changes["logprobs"] = self.logprobs
            if self.echo:
                changes["prompt_logprobs"] = max(self.logprobs, self._num_prompt_logprobs())
        if self.prompt_only:
            # An echo without log probabilities too, for which there are no parameters of 0 tokens.
            return self.model_copy(update={"max_tokens": 1}).sampling_params(defaults, **changes)
        return self.sampling_params(defaults, **changes)

    def _num_prompt_logprobs(self) -> int:
        if self.prompt_logprobs is None:
            return 0
        # Here, since the larger of two may hide that one is wrong.
        check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        return self.prompt_logprobs

    @property
    def field_names(self) -> dict[str, str]:
        """What the client called fields that errors name otherwise."""
        names = super().field_names
        if self.use_beam_search and self.prompt_logprobs is None:
            names["prompt_logprobs"] = "echo"
        return names

    def prompts(self, max_model_len: int) -> list[str | list[int]]:
        """The prompts one by one.

        Args:
            max_model_len: more token ids than these make no prompt.

        Raises:
            InvalidArgumentError: none, too many, one that is too long, or an empty one.
        """
        given = self.prompt
        if isinstance(given, list):
            _check_lengths(given, max_model_len)
            if not given or [] in given:
                raise InvalidArgumentError("prompt", "must not be an empty list, nor hold one")
        if isinstance(given, str) or _are_ints(given):
            prompts = [given]
        elif isinstance(given, list) and (
            all(isinstance(prompt, str) for prompt in given)
            or all(_are_ints(prompt) for prompt in given)
        ):
            prompts = given
        else:
            raise InvalidArgumentError(
                "prompt",
                "must be a string, a list of strings, token ids, or a list of token id lists",
            )
        return prompts


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    refused: ClassVar[Refused] = IN_CHATS

    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Objects | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Objects | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def tool_use(self) -> ToolUse:
        """The tools, or the functions in their place.

        Raises:
            InvalidArgumentError: a definition or the choice is wrong.
        """
        legacy = legacy_tool_use(self.functions, self.function_call, self.tools, self.tool_choice)
        if legacy is not None:
            return legacy
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def field_names(self) -> dict[str, str]:
        """What the client called fields that errors name otherwise."""
        names = super().field_names
        if self.functions:
            names |= LEGACY_NAMES
        if self.max_completion_tokens is not None and self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def calls_fit_max_tokens(self) -> bool | None:
        """`fit_max_tokens`, where it is said of the calls that `tool_choice` demands: there is no
        other constraint."""
        return self.fit_max_tokens if self._constraint.value is None else None

    def _fitting(self, fit_max_tokens: bool) -> dict[str, Any]:
        return {} if self._constraint.value is None else super()._fitting(fit_max_tokens)

    def chat_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`sampling_params` with this endpoint's own names.

        Raises:
            InvalidArgumentError: a value that can't be served.
        """
        changes: dict[str, Any] = {}
        if self.top_logprobs is not None:
            if not self.logprobs and self.top_logprobs:
                raise InvalidArgumentError("top_logprobs", "needs logprobs=true")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidArgumentError("top_logprobs", f"must be in [0, {MAX_LOGPROBS}]")
        if self.logprobs:
            changes["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is None:
            return self.sampling_params(defaults, **changes)
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidArgumentError(
                "max_tokens", "differs from max_completion_tokens, its newer name: set one"
            )
        return self.sampling_params(defaults, max_tokens=self.max_completion_tokens, **changes)


class TokenizeBody(BaseModel):
    """`POST /tokenize`: of a text, or of the prompt that a chat would make."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    functions: Objects | None = None
    documents: Objects | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def shown_tools(self) -> tuple[ToolDefinition, ...]:
        """What a chat that leaves the choice open would show of its tools, or of its functions.

        Raises:
            InvalidArgumentError: a definition is wrong.
        """
        use = legacy_tool_use(self.functions, None, self.tools, None)
        return (use or tool_use(self.tools, "none")).tools

    def check(self) -> None:
        """Raises InvalidArgumentError where there is neither prompt nor messages, or both."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgumentError(
                "prompt" if self.messages is None else "messages",
                "set prompt, or else messages: one of the two is tokenised",
            )
        if self.messages is not None and self.add_special_tokens:
            raise InvalidArgumentError(
                "add_special_tokens", "goes with prompt: messages get those of the chat template"
            )


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Integers


class LoadAdapterBody(BaseModel):
    """`POST /v1/load_lora_adapter`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadAdapterBody(BaseModel):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lora_name: str
    abort: bool | None = None
    timeout_s: float | None = None


def _are_ints(value: Any) -> bool:
    # By type and not isinstance: True is an int to Python.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _check_lengths(prompt: list[Any], max_model_len: int) -> None:
    """Before each item is looked at. Of what `prompt` may be, only token ids may be many."""
    first = prompt[0] if prompt else None
    check_count("prompt", prompt, max_model_len if type(first) is int else MAX_PROMPTS)
    for one in prompt:
        if isinstance(one, list):
            check_count("prompt", one, max_model_len)
