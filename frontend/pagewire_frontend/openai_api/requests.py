"""The bodies of OpenAI's requests, with pagewire's extensions.

Types are strict: a wrong type is refused as OpenAI does, by name. Fields that nobody here knows are
ignored, since clients send many; fields that are known and not served are refused, never ignored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from starlette.requests import ClientDisconnect, Request

from pagewire.beam_search_params import BeamSearchParams, BeamSettings
from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    check_count,
)
from pagewire.structured_output import MAX_CHOICES
from pagewire_frontend.chat_messages import MAX_MESSAGES, MAX_TOOLS
from pagewire_frontend.openai_api.structured_output import (
    GUIDED,
    Constraint,
    requested_constraint,
)
from pagewire_frontend.openai_api.unsupported import refuse_unsupported

MAX_PROMPTS = 1024
MAX_DOCUMENTS = 10_000
# Looking at each of many items would hold up all streams: these are counted first.
_MOST_ITEMS = {
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "documents": MAX_DOCUMENTS,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIASES,
    "guided_choice": MAX_CHOICES,
}
# Values of any kind, by the commas and brackets in a body, those in its texts too: a text with so
# many has more tokens than any model reads. To parse more holds up all streams for seconds.
_MOST_COMMAS = 1_200_000
_MOST_BRACKETS = 300_000
# Checking a body of more bytes than this takes a thread.
LONG_BODY = 64_000

BodyT = TypeVar("BodyT", bound=BaseModel)


def _check_numbers(value: Any) -> Any:
    if isinstance(value, dict) and not all(type(item) in (int, float) for item in value.values()):
        raise ValueError("its values must be numbers")
    return value


# Pydantic collects an error for each item of a list or a mapping: of millions of wrong ones it
# would make errors for minutes, with all streams of this process waiting.
Texts = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_check_numbers)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """What both generating endpoints share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Numbers | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    # pagewire's extensions, named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    _constraint: Constraint = PrivateAttr(default_factory=Constraint)

    def model_post_init(self, context: Any) -> None:
        # Here, where a long body has a thread to itself.
        guided = {name: getattr(self, name) for name in GUIDED}
        self._constraint = requested_constraint(
            self.response_format, self.structured_outputs, guided
        )

    def sampling_params(self, defaults: SamplingParams, **changes: Any) -> SamplingParams:
        """What is set here, over the model's defaults, `changes` over both.

        Raises:
            InvalidArgumentError: a value that can't be served.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        changes |= {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            changes["logit_bias"] = _logit_bias(self.logit_bias)
        if self._constraint.value is not None:
            changes["structured_output"] = self._constraint.value
        if self.use_beam_search:
            return self._beam_search(changes)
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) not in (None, getattr(BeamSettings(beam_width=1), name)):
                raise InvalidArgumentError(name, "needs use_beam_search=true")
        return replace(defaults, **changes)

    def _beam_search(self, given: dict[str, Any]) -> SamplingParams:
        """A beam search of the width best_of, or else n. The model's defaults are about sampling
        and play no part; nor does a seed."""
        given.pop("seed", None)
        n = given.pop("n", 1)
        length_penalty = 1.0 if self.length_penalty is None else self.length_penalty
        early_stopping: Any = self.early_stopping  # which strings it may be is checked there
        search = BeamSearchParams(
            n=n,
            beam_width=given.pop("best_of", n),
            temperature=given.pop("temperature", 0.0),
            length_penalty=length_penalty,
            early_stopping=False if self.early_stopping is None else early_stopping,
        )
        return replace(search.as_sampling_params(), **given)

    @property
    def field_names(self) -> dict[str, str]:
        """What the client called fields that errors name otherwise."""
        names = dict(self._constraint.field_names)
        if self.use_beam_search:
            width = "n" if self.best_of is None else "best_of"
            names |= {"beam_width": width, "prompt_logprobs": "echo"}
        return names

    @property
    def streams(self) -> bool:
        """Raises InvalidArgumentError for stream_options without a stream, and for best_of with
        one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", "is only allowed with stream=true")
        if self.stream and not self.use_beam_search and self.best_of not in (None, self.n or 1):
            raise InvalidArgumentError(
                "best_of",
                "can't be streamed: the best are known at the end. Leave out stream, or best_of",
            )
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_SAMPLING_FIELDS = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "max_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    # Checked in `prompts`: pydantic's union would collect an error for each of 100,000 token ids.
    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt's log probabilities are wanted (echo with max_tokens=0)."""
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
                changes["prompt_logprobs"] = self.logprobs
        if self.prompt_only:
            # The engine always samples one; it is left out of the answer.
            return self.model_copy(update={"max_tokens": 1}).sampling_params(defaults, **changes)
        return self.sampling_params(defaults, **changes)

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
        if not prompts:
            raise InvalidArgumentError("prompt", "must not be an empty list")
        return prompts


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Objects | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

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
        if self.max_completion_tokens < 1:
            raise InvalidArgumentError(
                "max_completion_tokens", f"must be at least 1, not {self.max_completion_tokens}"
            )
        return self.sampling_params(defaults, max_tokens=self.max_completion_tokens, **changes)


class TokenizeBody(BaseModel):
    """`POST /tokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Integers


async def read_body(request: Request, body_class: type[BodyT]) -> BodyT:
    """The request's JSON body, checked.

    Raises:
        InvalidArgumentError: it is not JSON, or a field is wrong or not served.
        RequestTooLargeError: it is too long.
    """
    media_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    # Not a formality: browsers let any page post text/plain here, but not application/json.
    if media_type != "application/json":
        raise InvalidArgumentError("", "send the header `Content-Type: application/json`")
    try:
        content = await request.body()
    except ClientDisconnect:
        raise InvalidArgumentError("", "the client left in the middle of its body") from None
    if len(content) > LONG_BODY:
        return await asyncio.to_thread(_checked, content, body_class)
    return _checked(content, body_class)


def _checked(content: bytes, body_class: type[BodyT]) -> BodyT:
    if (
        content.count(b",") > _MOST_COMMAS
        or content.count(b"[") + content.count(b"{") > _MOST_BRACKETS
    ):
        raise InvalidArgumentError("", "the body holds more values than any request can use")
    data = _parse_json(content)
    if not isinstance(data, dict):
        raise InvalidArgumentError("", "the body must be a JSON object")
    for name, most in _MOST_ITEMS.items():
        if isinstance(value := data.get(name), list | dict):
            check_count(name, value, most)
    refuse_unsupported(data, is_chat=body_class is ChatBody)
    try:
        return body_class.model_validate(data)
    except ValidationError as error:
        raise _describe(error) from None


def _parse_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        first_error = str(error)
    # Python's own parser takes NaN, which Python clients write, and integers of any length: those
    # are refused further on by the name of their field.
    try:
        data = json.loads(body)
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            "", "the body has half of a surrogate pair in a string"
        ) from None
    except (ValueError, RecursionError):
        raise InvalidArgumentError("", f"the body is not valid JSON: {first_error}") from None
    return data


def _describe(error: ValidationError) -> InvalidArgumentError:
    """The first thing that is wrong. Values are left out: they may be the prompt."""
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = str(detail["loc"][0]) if detail["loc"] else ""
    position = [part for part in detail["loc"][1:] if isinstance(part, int)]
    path = field + "".join(f"[{index}]" for index in position)
    if detail["type"] == "missing":
        return InvalidArgumentError(path, "is required")
    message = detail["msg"]
    return InvalidArgumentError(path, message[:1].lower() + message[1:])


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


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    converted = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidArgumentError("logit_bias", "its keys must be token ids")
        converted[int(key)] = bias
    return converted
