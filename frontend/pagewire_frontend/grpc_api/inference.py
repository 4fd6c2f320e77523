"""pagewire.v1.Inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from pagewire.conversion import tasks_to_proto
from pagewire.pooling import Task
from pagewire.sampling_params import SamplingParams
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire_frontend import token_service
from pagewire_frontend.chat_template import RenderedChat
from pagewire_frontend.faults import renaming
from pagewire_frontend.finished import FinishedGeneration
from pagewire_frontend.generation import Generation
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.grpc_api import requests, vectors
from pagewire_frontend.grpc_api.access import authorization_of
from pagewire_frontend.grpc_api.errors import answers_errors
from pagewire_frontend.grpc_api.reply_size import fits_clients
from pagewire_frontend.grpc_api.responses import (
    fill_choice,
    fill_output,
    fill_usage,
    position_text,
    prompt_position,
)
from pagewire_frontend.grpc_api.streams import ResponseStream
from pagewire_frontend.grpc_api.write_guard import WriteGuard
from pagewire_frontend.request_ids import check_request_id
from pagewire_frontend.serving import Serving
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tool_choice import ToolDefinition
from pagewire_frontend.tracing import phase

Context = grpc.aio.ServicerContext[Any, Any]
GeneratedResponse = inference_pb2.GenerateResponse | inference_pb2.ChatResponse

# What generation calls the prompt is a chat's messages.
_CHAT_FIELDS = {"prompt": "messages", "prompt_token_ids": "messages"}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):  # type: ignore[misc]  # generated, untyped
    """Text in, text out. Thin: what a request means is `generation`'s business."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @answers_errors
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        asked = await self._generate_request(request, context)
        response = inference_pb2.GenerateResponse(request_id=asked.request_id, model=asked.model)
        await self._write_all(context, asked, response, {})

    @answers_errors
    @fits_clients("call Generate, which streams it in parts")
    async def GenerateUnary(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        asked = await self._generate_request(request, context)
        response = inference_pb2.GenerateResponse(request_id=asked.request_id, model=asked.model)
        whole = await self._collect(asked, response, {})
        for sequence in whole.sequences:
            output = response.outputs.add()
            fill_output(output, sequence)
            output.text = sequence.text
            output.logprobs.extend(map(position_text, sequence.logprobs))
        return response

    @answers_errors
    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:
        asked = await self._chat_request(request, context)
        response = inference_pb2.ChatResponse(request_id=asked.request_id, model=asked.model)
        await self._write_all(context, asked, response, _CHAT_FIELDS)

    @answers_errors
    @fits_clients("call Chat, which streams it in parts")
    async def ChatUnary(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> inference_pb2.ChatResponse:
        asked = await self._chat_request(request, context)
        response = inference_pb2.ChatResponse(request_id=asked.request_id, model=asked.model)
        whole = await self._collect(asked, response, _CHAT_FIELDS)
        for sequence in whole.sequences:
            choice = response.choices.add()
            fill_output(choice, sequence)
            fill_choice(choice, sequence)
            choice.logprobs.extend(map(position_text, sequence.logprobs))
        return response

    @answers_errors
    @fits_clients("leave out with_tokens")
    async def RenderChat(
        self, request: inference_pb2.RenderChatRequest, context: Context
    ) -> inference_pb2.RenderChatResponse:
        generation = await self._serving.generation.find_model(request.model)
        tools = requests.tool_definitions(request.tools)
        rendered = await self._render(generation, request, tools)
        response = inference_pb2.RenderChatResponse(
            prompt=rendered.prompt, token_ids=rendered.token_ids
        )
        if request.with_tokens:
            _tell_tokens(response, generation.tokenizer)
        return response

    @answers_errors
    @fits_clients("name a smaller template in the request")
    async def ListChatTemplates(
        self, request: inference_pb2.ListChatTemplatesRequest, context: Context
    ) -> inference_pb2.ListChatTemplatesResponse:
        generation = await self._serving.generation.find_model(request.model)
        response = inference_pb2.ListChatTemplatesResponse(
            requests_may_bring_one=generation.settings.allow_request_chat_template
        )
        for name, source in sorted(generation.chat_template.templates.items()):
            response.templates.add(name=name, source=source)
        return response

    @answers_errors
    @fits_clients("leave out with_bytes, or send less text")
    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        generation = await self._serving.generation.find_model(request.model)
        token_ids, tokens = await token_service.tokenize(
            generation,
            request.text,
            add_special_tokens=_default_true(request, "add_special_tokens"),
            parse_special_tokens=(
                request.parse_special_tokens if request.HasField("parse_special_tokens") else None
            ),
        )
        response = inference_pb2.TokenizeResponse(
            token_ids=token_ids, tokens=tokens, max_model_len=generation.model_info.max_model_len
        )
        if request.with_bytes:
            _tell_tokens(response, generation.tokenizer)
        return response

    @answers_errors
    @fits_clients("send fewer token ids")
    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        generation = await self._serving.generation.find_model(request.model)
        text = await token_service.detokenize(
            generation, request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=text)

    @answers_errors
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        generation = self._serving.generation
        info = generation.model_info
        models = [
            inference_pb2.Model(
                id=info.served_model_name,
                root=info.served_model_name,
                created=info.created,
                max_model_len=info.max_model_len,
                tasks=tasks_to_proto(info.tasks),
                embedding_size=(
                    info.pooling.size
                    if info.pooling is not None and Task.EMBED in info.tasks
                    else 0
                ),
            )
        ]
        models += [
            inference_pb2.Model(
                id=adapter.name,
                root=adapter.root,
                parent=adapter.parent,
                created=adapter.loaded_at,
                max_model_len=info.max_model_len,
                tasks=tasks_to_proto(info.tasks),
            )
            for adapter in generation.adapters.known()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    @answers_errors
    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        return await vectors.embed(
            self._serving, request, self._tenant(context), context.invocation_metadata()
        )

    @answers_errors
    async def EmbedStream(self, request: inference_pb2.EmbedRequest, context: Context) -> None:
        async with WriteGuard(context, self._serving) as guard:
            async for part in vectors.embed_in_parts(self._serving, request, self._tenant(context)):
                await guard.write(part)

    @answers_errors
    @fits_clients("send fewer texts")
    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> inference_pb2.ClassifyResponse:
        return await vectors.classify(self._serving, request, self._tenant(context))

    @answers_errors
    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreResponse:
        return await vectors.score(self._serving, request, self._tenant(context))

    async def _write_all(
        self,
        context: Context,
        asked: GenerationRequest,
        response: GeneratedResponse,
        field_names: Mapping[str, str],
    ) -> None:
        """Streams what was asked for in messages like `response`, which says of what they are."""
        async with self._serving.run(asked, field_names) as generation:
            guard = WriteGuard(context, self._serving)
            await ResponseStream(guard, response, self._tokenizer_of(asked)).write_all(generation)

    async def _collect(
        self,
        asked: GenerationRequest,
        response: GeneratedResponse,
        field_names: Mapping[str, str],
    ) -> FinishedGeneration:
        """What was asked for, in one piece; tells in `response` what all its sequences share."""
        async with self._serving.run(asked, field_names) as generation:
            whole = await generation.collect()
        to_message = partial(prompt_position, self._tokenizer_of(asked))
        response.prompt_logprobs.extend(map(to_message, whole.prompt_logprobs))
        fill_usage(response.usage, generation.usage())
        return whole

    def _tokenizer_of(self, request: GenerationRequest) -> Tokenizer | None:
        return self._serving.generation.for_model(request.model).tokenizer_or_none

    async def _generate_request(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> GenerationRequest:
        model = (await self._serving.generation.find_model(request.model)).model_name
        info = self._serving.generation.model_info
        generation_request = requests.generation_request(
            request, model, info.default_sampling_params, info.max_model_len
        )
        return replace(generation_request, tenant=self._tenant(context))

    async def _chat_request(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> GenerationRequest:
        generation = await self._serving.generation.find_model(request.model)
        request_id = check_request_id(request.request_id)
        params = requests.sampling_params(request, self._defaults())
        use = requests.tool_use_of(request)
        rendered = await self._render(generation, request, use.shown_tools)
        return GenerationRequest(
            request_id=request_id,
            model=generation.model_name,
            prompt_token_ids=rendered.prompt_token_ids(),
            sampling_params=params,
            add_special_tokens=False,
            tenant=self._tenant(context),
            priority=request.priority,
            text_version=generation.text_version,
            answer=generation.answer_format(
                rendered,
                use,
                include_reasoning=_default_true(request, "include_reasoning"),
                constrained=params.structured_output is not None,
                thinking_token_budget=(
                    request.thinking_token_budget
                    if request.HasField("thinking_token_budget")
                    else None
                ),
            ),
        )

    async def _render(
        self,
        generation: Generation,
        request: inference_pb2.ChatRequest | inference_pb2.RenderChatRequest,
        tools: Sequence[ToolDefinition],
    ) -> RenderedChat:
        with renaming(_CHAT_FIELDS), phase("render_chat"):
            return await generation.rendered_chat(
                requests.chat_messages(request.messages),
                num_bytes=request.ByteSize(),
                tools=tools,
                **requests.template_arguments(request.template_params),
            )

    def _tenant(self, context: Context) -> str:
        return self._serving.access.tenant(authorization_of(context.invocation_metadata()))

    def _defaults(self) -> SamplingParams:
        return self._serving.generation.model_info.default_sampling_params


def _default_true(
    request: inference_pb2.TokenizeRequest | inference_pb2.ChatRequest, field: str
) -> bool:
    return bool(getattr(request, field)) if request.HasField(field) else True


def _tell_tokens(
    response: inference_pb2.RenderChatResponse | inference_pb2.TokenizeResponse,
    tokenizer: Tokenizer,
) -> None:
    token_ids = response.token_ids
    response.token_bytes.extend(token_service.bytes_of(tokenizer, token_ids))
    response.control_positions.extend(token_service.control_positions(tokenizer, token_ids))
