"""Request messages to what `generation` takes; what can't be served is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from pagewire.conversion import beam_search_from_proto, sampling_params_from_proto
from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    check_count,
)
from pagewire.v1 import inference_pb2
from pagewire_frontend.answers import TOOL_NAME
from pagewire_frontend.chat_messages import MAX_MESSAGES, MAX_TOOLS
from pagewire_frontend.faults import renaming
from pagewire_frontend.generation_types import (
    COMPLETION_MAX_TOKENS,
    MAX_PROMPTS,
    GenerationRequest,
)
from pagewire_frontend.request_ids import check_request_id
from pagewire_frontend.tool_choice import ToolUse, among, fitting, named_tool, tool_use

_CHOICES = {
    inference_pb2.ToolChoice.MODE_UNSPECIFIED: None,
    inference_pb2.ToolChoice.MODE_NONE: "none",
    inference_pb2.ToolChoice.MODE_AUTO: "auto",
    inference_pb2.ToolChoice.MODE_REQUIRED: "required",
}


def sampling_params(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, defaults: SamplingParams
) -> SamplingParams:
    """How a call's tokens are chosen and made text of: over the model's defaults, unless it asks
    for a beam search.

    Raises:
        InvalidArgumentError: a value that can't be served.
    """
    text = request.text_params
    check_count("stop", text.stop, MAX_STOP_STRINGS)
    if request.WhichOneof("decoding") == "beam_search":
        params = beam_search_from_proto(request.beam_search)
    else:
        message = request.sampling_params
        # Counted before each is looked at: a message of 16 MB holds millions.
        check_count("logit_bias", message.logit_bias, MAX_LOGIT_BIASES)
        check_count("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS)
        params = sampling_params_from_proto(message, defaults)
    changes: dict[str, Any] = {}
    if text.stop:
        changes["stop"] = tuple(text.stop)
    if text.HasField("include_stop_str_in_output"):
        changes["include_stop_str_in_output"] = text.include_stop_str_in_output
    if text.HasField("skip_special_tokens"):
        changes["skip_special_tokens"] = text.skip_special_tokens
    return replace(params, **changes) if changes else params


def generation_request(
    request: inference_pb2.GenerateRequest,
    model: str,
    defaults: SamplingParams,
    max_model_len: int,
) -> GenerationRequest:
    """A Generate call's request."""
    check_count("prompt_token_ids", request.token_ids.ids, max_model_len)
    params = sampling_params(request, defaults)
    case = request.WhichOneof("prompt")
    if case is None:
        raise InvalidArgumentError("prompt", "set text or token_ids")
    return GenerationRequest(
        request_id=check_request_id(request.request_id),
        model=model,
        prompt=request.text if case == "text" else None,
        prompt_token_ids=list(request.token_ids.ids) if case == "token_ids" else None,
        sampling_params=params,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        add_special_tokens=(
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        ),
        priority=request.priority,
    )


def chat_messages(messages: Iterable[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's shape.

    Raises:
        InvalidArgumentError: content that is not text.
    """
    check_count("messages", messages, MAX_MESSAGES)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(path: str, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    texts = [_text(f"{path}.content[{i}]", part) for i, part in enumerate(message.content)]
    converted: dict[str, Any] = {"role": message.role}
    if len(texts) > 1:
        converted["content"] = [{"type": "text", "text": text} for text in texts]
    elif texts:
        converted["content"] = texts[0]
    if message.name:
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        converted["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        converted["reasoning_content"] = message.reasoning_content
    return converted


def _text(path: str, part: inference_pb2.ContentPart) -> str:
    case = part.WhichOneof("part")
    if case == "text":
        return part.text
    if case is None:
        raise InvalidArgumentError(
            f"{path}.part", "is empty or of a kind this server does not know"
        )
    raise InvalidArgumentError(f"{path}.{case}", f"this model takes text only, no {case}")


def template_arguments(params: inference_pb2.ChatTemplateParams) -> dict[str, Any]:
    """Keyword arguments of `Generation.render_chat`."""
    check_count("documents", params.documents, MAX_PROMPTS)
    return {
        "documents": [
            _plain(f"documents[{number}]", document)
            for number, document in enumerate(params.documents)
        ],
        "chat_template": params.chat_template if params.HasField("chat_template") else None,
        "chat_template_kwargs": (
            _plain("chat_template_kwargs", params.chat_template_kwargs) or None
        ),
        "add_generation_prompt": (
            params.add_generation_prompt if params.HasField("add_generation_prompt") else None
        ),
        "continue_final_message": params.continue_final_message,
        "reasoning_effort": params.reasoning_effort or None,
    }


def tool_definitions(tools: Iterable[inference_pb2.Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape, as chat templates want them."""
    check_count("tools", tools, MAX_TOOLS)
    converted = []
    for index, tool in enumerate(tools):
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidArgumentError(
                f"tools[{index}].name", "must be 1 to 128 letters, digits or any of _ - . : /"
            )
        function: dict[str, Any] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": _parameters(f"tools[{index}]", tool),
        }
        if tool.strict:
            function["strict"] = True
        converted.append({"type": "function", "function": function})
    return converted


def tool_use_of(request: inference_pb2.ChatRequest) -> ToolUse:
    """Which tools the answer may call.

    Raises:
        InvalidArgumentError: a tool or the choice is wrong.
    """
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    tools = tool_definitions(request.tools)
    choice = request.tool_choice
    if choice.WhichOneof("choice") == "name":
        use = named_tool(tool_use(tools, None, parallel), choice.name)
    elif choice.mode not in _CHOICES:
        raise InvalidArgumentError("tool_choice.mode", f"{choice.mode} is none of its values")
    else:
        use = tool_use(tools, _CHOICES[choice.mode], parallel)
    if choice.allowed_names:
        use = _among_named(use, choice)
    with renaming({"fit_max_tokens": "tool_choice.fit_max_tokens"}):
        return fitting(use, choice.fit_max_tokens if choice.HasField("fit_max_tokens") else None)


def _among_named(use: ToolUse, choice: inference_pb2.ToolChoice) -> ToolUse:
    where = "tool_choice.allowed_names"
    check_count(where, choice.allowed_names, MAX_TOOLS)
    if choice.WhichOneof("choice") == "name" or choice.mode == choice.MODE_NONE:
        raise InvalidArgumentError(where, "needs a mode that leaves a choice: auto or required")
    return among(use, {name: f"{where}[{n}]" for n, name in enumerate(choice.allowed_names)})


def _parameters(where: str, tool: inference_pb2.Tool) -> dict[str, Any]:
    if tool.WhichOneof("schema") != "parameters_json":
        return _plain(f"{where}.parameters", tool.parameters)
    try:
        schema = orjson.loads(tool.parameters_json)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(
            f"{where}.parameters_json", f"is not valid JSON: {error}"
        ) from None
    if not isinstance(schema, dict):
        raise InvalidArgumentError(f"{where}.parameters_json", "must be a JSON object")
    return schema


def _plain(path: str, struct: Struct) -> dict[str, Any]:
    try:
        converted: dict[str, Any] = _whole_numbers(MessageToDict(struct))
    except (JsonError, ValueError):  # which of them depends on the version of protobuf
        raise InvalidArgumentError(path, "holds NaN, an infinity, or a value of no kind") from None
    return converted


def _whole_numbers(value: Any) -> Any:
    # A Struct knows doubles only; a template that is given 5 must not print 5.0.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return value
