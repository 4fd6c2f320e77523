"""What clients of OpenAI and vLLM may ask for and is not served here: refused by name, since to
ignore it would be to answer another question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.errors import InvalidArgumentError

# For each field, the values that ask for nothing. None and absence always do.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Both endpoints.
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,),
    # Completions.
    "suffix": ("",),
    "prompt_embeds": (),
    # Chat.
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": ([], ["text"]),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "verbosity": ("medium",),
    "mm_processor_kwargs": ({},),
}
# Of chats only.
_NEUTRAL_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "documents": ([],),
    "thinking_token_budget": (),
}
_HINTS = {
    "functions": "use tools, its newer name",
    "function_call": "use tool_choice, its newer name",
    "tools": "use /v1/chat/completions",
    "tool_choice": "use /v1/chat/completions",
    "documents": "use /v1/chat/completions",
    "prompt_logprobs": "use echo with logprobs on /v1/completions, or the gRPC API",
}


def refuse_unsupported(body: Mapping[str, Any], *, is_chat: bool) -> None:
    """Raises InvalidArgumentError for the first field that asks for what is not served."""
    for name, neutral in (_NEUTRAL if is_chat else _NEUTRAL | _NEUTRAL_IN_COMPLETIONS).items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise InvalidArgumentError(name, f"is not supported by this server{_hint(name)}")
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        raise InvalidArgumentError(
            "stream_options.continuous_usage_stats", "is not supported by this server"
        )


def _hint(name: str) -> str:
    return f": {_HINTS[name]}" if name in _HINTS else ""
