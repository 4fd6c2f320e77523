"""From a chat's body to the request that generation takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from pagewire_frontend.chat_template import RenderedChat
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.openai_api.requests import ChatBody, TokenizeBody
from pagewire_frontend.serving import Serving
from pagewire_frontend.tool_choice import ToolDefinition, fitting
from pagewire_frontend.tracing import phase


async def chat_request(serving: Serving, request: Request, body: ChatBody) -> GenerationRequest:
    """Renders the conversation.

    Args:
        serving: the engine.
        request: whose length says whether that takes a thread, and whose it is.
        body: the chat.

    Raises:
        PagewireError: something in it can't be served.
    """
    generation = await serving.generation.find_model(body.model or "")
    params = body.chat_sampling_params(generation.model_info.default_sampling_params)
    use = fitting(body.tool_use(), body.calls_fit_max_tokens)
    with phase("render_chat"):
        rendered = await rendered_chat(generation, request, body.messages, body, use.shown_tools)
    return GenerationRequest(
        request_id=request.state.request_id,
        model=generation.model_name,
        prompt_token_ids=rendered.prompt_token_ids(),
        sampling_params=params,
        add_special_tokens=False,
        tenant=request.state.tenant,
        priority=body.priority or 0,
        text_version=generation.text_version,
        answer=generation.answer_format(
            rendered,
            use,
            include_reasoning=body.include_reasoning is not False,
            thinking_token_budget=body.thinking_token_budget,
            constrained=params.structured_output is not None,
        ),
    )


async def rendered_chat(
    generation: Generation,
    request: Request,
    messages: list[dict[str, Any]],
    body: ChatBody | TokenizeBody,
    tools: Sequence[ToolDefinition] | None,
) -> RenderedChat:
    """The prompt of a body's messages.

    Raises:
        PagewireError: they can't be rendered.
    """
    return await generation.rendered_chat(
        messages,
        num_bytes=len(await request.body()),
        tools=tools,
        documents=body.documents,
        reasoning_effort=body.reasoning_effort,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
