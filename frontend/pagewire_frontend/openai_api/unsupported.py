"""What clients of OpenAI and vLLM may ask for and is not served here: refused by name, since to
ignore it would be to answer another question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.errors import InvalidArgumentError

Refused = Mapping[str, tuple[Any, ...]]
"""For each field, the values that ask for nothing. None and absence always do."""

_WHERE_TEXT_IS_MADE: Refused = {
    "guided_whitespace_pattern": (),
    "guided_json_object": (False,),
    # llama.cpp's names of constraints.
    "grammar": ("", False),
    "json_schema": (False,),
    "request_id": ("",),
    "structural_tag": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "audio": (),
    "modalities": ([], ["text"]),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "verbosity": ("medium",),
    "mm_processor_kwargs": ({},),
}
IN_CHATS: Refused = {
    **_WHERE_TEXT_IS_MADE,
    # What only completions have.
    "echo": (False,),
    "add_special_tokens": (False,),
}
_FUNCTIONS: Refused = {"functions": ([],), "function_call": ("none", "auto")}
IN_COMPLETIONS: Refused = {
    **_WHERE_TEXT_IS_MADE,
    # What only chats have.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    **_FUNCTIONS,
    "documents": ([],),
    "thinking_token_budget": (),
}
IN_RESPONSES: Refused = {
    **{name: values for name, values in IN_CHATS.items() if name not in ("store", "verbosity")},
    **_FUNCTIONS,
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": ([],),
    "messages": (),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "prompt_logprobs": (),
    "documents": ([],),
}
IN_POOLING: Refused = {
    "messages": (),
    "softmax": (),
    "activation": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    "cache_salt": (),
    "request_id": ("",),
}
IN_RERANKING: Refused = {**IN_POOLING, "max_tokens_per_doc": (), "rank_fields": ([], ["text"])}
_HINTS = {
    "suffix": "for a model that fills in the middle, write its own control tokens into prompt",
    "store": "/v1/responses keeps answers, where the operator gives it room (--response-store)",
    "verbosity": "say in a message how long the answer is to be",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias, or structured_outputs",
    "guided_json_object": "use response_format",
    "grammar": "use structured_outputs with grammar",
    "json_schema": "use response_format",
    "request_id": "send the header X-Request-Id",
    "echo": "use /v1/completions",
    "add_special_tokens": "leave it out: messages get those of the chat template",
    "structural_tag": "use tools, or structured_outputs with a grammar",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts its tokens",
    "prompt_embeds": "use prompt",
    "prediction": "leave it out: it changes no answer",
    "softmax": "use use_activation, its newer name",
    "activation": "use use_activation, its newer name",
    "max_tokens_per_doc": "use truncate_prompt_tokens, which counts the query too",
    "functions": "/v1/chat/completions takes it, and /v1/responses takes tools, its newer name",
    "function_call": "/v1/chat/completions takes it, and /v1/responses takes tool_choice",
    "tools": "use /v1/chat/completions",
    "tool_choice": "use /v1/chat/completions",
    "documents": "use /v1/chat/completions",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "prompt_logprobs": "use /v1/completions or /v1/chat/completions",
}


def refuse_unsupported(body: Mapping[str, Any], refused: Refused) -> None:
    """Raises InvalidArgumentError for the first field that asks for what is not served."""
    for name, neutral in refused.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise InvalidArgumentError(name, f"is not supported by this server{_hint(name)}")
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        raise InvalidArgumentError(
            "stream_options.continuous_usage_stats",
            "is not supported by this server: leave it out; include_usage tells it at the end",
        )


def _hint(name: str) -> str:
    return f": {_HINTS.get(name, 'leave it out')}"
