"""What callers of `LLM` give it, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.generation_types import COMPLETION_MAX_TOKENS, GenerationRequest

Prompt = str | Mapping[str, Any]
Messages = list[dict[str, Any]]


def engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """The engine's settings.

    Raises:
        InvalidArgumentError: one is unknown or has no such value; it names it.
    """
    try:
        return EngineConfig(model=model, **settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(EngineConfig.model_fields)
            raise InvalidArgumentError(name, f"is not a setting; there are: {known}") from None
        message = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidArgumentError(name, message) from None


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts, of which one alone may have been given."""
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def prompt_request(prompt: Prompt, where: str) -> GenerationRequest:
    """What is to be generated from a prompt.

    Args:
        prompt: text, or a mapping with `prompt`, `prompt_token_ids` or both.
        where: what the error calls it.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if isinstance(prompt, str):
        return GenerationRequest(prompt=prompt, default_max_tokens=COMPLETION_MAX_TOKENS)
    if not isinstance(prompt, Mapping):
        raise InvalidArgumentError(
            where,
            f'must be text, {{"prompt": text}} or {{"prompt_token_ids": ids}}, not {prompt!r:.80}',
        )
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if unknown or (token_ids is None and text is None):
        raise InvalidArgumentError(
            where, f"needs prompt or prompt_token_ids, and has {sorted(map(str, prompt))}"
        )
    if text is not None and not isinstance(text, str):
        raise InvalidArgumentError(where, "prompt must be text")
    if token_ids is None:
        return GenerationRequest(prompt=text, default_max_tokens=COMPLETION_MAX_TOKENS)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in token_ids):
        raise InvalidArgumentError(where, "prompt_token_ids must be whole numbers")
    return GenerationRequest(
        prompt=text,
        prompt_token_ids=list(token_ids),
        default_max_tokens=COMPLETION_MAX_TOKENS,
    )


def prioritised(
    requests: list[GenerationRequest], priority: int | Sequence[int]
) -> list[GenerationRequest]:
    """The requests with their priorities: one for all, or one for each.

    Raises:
        InvalidArgumentError: there are not as many as requests, or one is no int32.
    """
    each = [priority] * len(requests) if isinstance(priority, int) else list(priority)
    if len(each) != len(requests):
        raise InvalidArgumentError(
            "priority",
            f"{len(each)} priorities for {len(requests)} prompts; give one for all, or one for "
            "each",
        )
    if not all(isinstance(one, int) and -(2**31) <= one < 2**31 for one in each):
        raise InvalidArgumentError("priority", "must be whole numbers of 32 bits")
    return [replace(request, priority=one) for request, one in zip(requests, each, strict=True)]


def conversations_of(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """The conversations, of which one alone may have been given.

    Raises:
        InvalidArgumentError: there is none.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidArgumentError(
            "messages", "must be a list of messages, or a list of such lists"
        )
    if isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """Parameters for each of `count` prompts: one set for all, or one for each.

    Raises:
        InvalidArgumentError: there are not as many as prompts, or one is something else.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise InvalidArgumentError("sampling_params", "must be SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidArgumentError(
            "sampling_params",
            f"{len(params)} sets of parameters for {count} prompts; give one for all, or one "
            "for each",
        )
    return list(params)
