"""The one path from text to text: every public API and `LLM` come through here."""

from __future__ import annotations

import asyncio
import copy
import functools
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagewire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PagewireError,
    UnavailableError,
)
from pagewire.pooling import Task, check_task
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.adapters import AdapterDirectory, KnownAdapter, TextSide
from pagewire_frontend.answer_format import AnswerFormat, answer_format
from pagewire_frontend.best_of import ENGINE_FIELD_NAMES
from pagewire_frontend.chat_template import ChatTemplate, RenderedChat
from pagewire_frontend.engine_client.base import (
    EngineClient,
    EngineRequest,
    ModelInfo,
    TokenStream,
)
from pagewire_frontend.errors import TokenIdsOnlyError
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.prompt_limits import (
    checked_token_ids,
    encoded_text,
    naming_the_context,
    resolved,
)
from pagewire_frontend.reasoning import with_effort
from pagewire_frontend.running_generation import RunningGeneration
from pagewire_frontend.thread_turns import ThreadTurns
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tool_choice import ToolDefinition, ToolUse
from pagewire_frontend.tracing import current_headers, phase

# Adapters that an error names.
_MOST_NAMES = 8
# Rendering and tokenising a chat whose request is larger would hold up other streams.
_LONG_CHAT_BYTES = 20_000


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What an operator decides about text.

    Attributes:
        parse_control_tokens_in_chat: read control tokens inside chat messages as such.
        parse_control_tokens_in_prompts: read control tokens inside raw prompts as such.
        allow_request_chat_template: let requests bring their own template.
        chat_templates: templates by name, in place of the model's own or beside them; see
            `ChatTemplate.from_files`.
        tool_call_parser, reasoning_parser: how calls and reasoning are found in a chat's answer: a
            name, "none", or "auto", by the chat template.
    """

    parse_control_tokens_in_chat: bool = False
    parse_control_tokens_in_prompts: bool = True
    allow_request_chat_template: bool = False
    chat_templates: Mapping[str, str] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class Generation:
    """Text in, text out, over one engine. Lives on one event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        settings: GenerationSettings,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.client = client
        self.settings = settings
        self.adapters = AdapterDirectory(client, TextSide(tokenizer, chat_template), files or {})
        self._adapter: KnownAdapter | None = None
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._turns = ThreadTurns()
        self._live: set[tuple[str, str]] = set()
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def create(cls, client: EngineClient, settings: GenerationSettings) -> Generation:
        """Over a started client, with the tokenizer that its engine hands out.

        Raises:
            FailedPreconditionError: the tokenizer can't be used.
            ChatTemplateError: the settings' template does not parse.
        """
        files = await client.fetch_tokenizer()
        tokenizer = template = None
        if files:
            tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
            template = ChatTemplate.from_files(files, tokenizer, override=settings.chat_templates)
        generation = cls(client, tokenizer, template, settings, files)
        await generation.adapters.refresh()
        return generation

    @property
    def model_info(self) -> ModelInfo:
        return self.client.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises FailedPreconditionError when the engine serves token ids only."""
        if self._tokenizer is None:
            raise TokenIdsOnlyError
        return self._tokenizer

    @property
    def tokenizer_or_none(self) -> Tokenizer | None:
        """None when the engine serves token ids only."""
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises FailedPreconditionError when the engine serves token ids only."""
        if self._chat_template is None:
            self.tokenizer  # noqa: B018 (raises: no tokenizer, no template)
            raise FailedPreconditionError("the model has no chat template")
        return self._chat_template

    def check_generates(self) -> None:
        """Raises FailedPreconditionError where the model gives vectors and no text."""
        info = self.model_info
        check_task(Task.GENERATE, info.tasks, info.served_model_name)

    async def find_model(self, name: str) -> Generation:
        """`for_model`, for names too that another frontend has only just given an adapter."""
        if name not in ("", self.model_name, self.model_info.served_model_name):
            await self.adapters.look_up(name)
        return self.for_model(name)

    def for_model(self, name: str) -> Generation:
        """The path of a model's requests: this one, or that of an adapter, with its own tokenizer
        and chat template where it ships them.

        Args:
            name: what a request calls its model; "": the served one.

        Raises:
            NotFoundError: it is not served.
            FailedPreconditionError: what the adapter ships can't be used.
        """
        served = self.model_info.served_model_name
        if name == self.model_name or name in ("", served):
            return self
        known = self.adapters.find(name)
        if known is None:
            others = ", ".join(repr(each.name) for each in self.adapters.known()[:_MOST_NAMES])
            raise NotFoundError(
                f"the model {name!r} is not served here; {served!r} is"
                + (f", and its adapters {others}" if others else ""),
                field="model",
            )
        path = copy.copy(self)
        path._adapter = known
        path._tokenizer, path._chat_template = known.text.tokenizer, known.text.chat_template
        return path

    @property
    def model_name(self) -> str:
        """The served model's name, or the adapter's."""
        if self._adapter is not None:
            return self._adapter.info.name
        return self.model_info.served_model_name

    @property
    def text_version(self) -> str:
        """Of the tokenizer and chat template that the adapter ships; "": the model's own are used.
        A prompt that was made with them is not for those of a later version."""
        return "" if self._adapter is None else self._adapter.text_version

    def check_model(self, name: str) -> str:
        """The name of a model that is served; NotFoundError for one that is not."""
        return self.for_model(name).model_name

    async def rendered_chat(
        self, messages: list[dict[str, Any]], *, num_bytes: int, **arguments: Any
    ) -> RenderedChat:
        """`render_chat`, in a thread where it may take long: for a request of many bytes, and for a
        template that it brings, which does what it likes until its budget is spent. Those take
        turns: many threads at once would leave the event loop little of the processor."""
        render = functools.partial(self.render_chat, messages, **arguments)
        template = arguments.get("chat_template")
        own = {} if self._chat_template is None else self._chat_template.templates
        if template is not None and template not in own:
            return await self._turns.run(render)
        if num_bytes > _LONG_CHAT_BYTES:
            return await asyncio.to_thread(render)
        return render()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[ToolDefinition] | None = None,
        documents: list[dict[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """The exact prompt of a conversation; see `ChatTemplate.render`. Runs in any thread.

        Args:
            reasoning_effort: for templates that read it; "none" asks for no reasoning.

        Raises:
            FailedPreconditionError: there is no template, or requests may not bring one, or the
                model generates no text.
            ChatTemplateError, InvalidArgumentError: these messages can't be rendered.
        """
        self.check_generates()
        own = self.chat_template
        if (
            chat_template is not None
            and chat_template not in own.templates
            and not self.settings.allow_request_chat_template
        ):
            raise FailedPreconditionError(
                "this server takes no chat templates from requests; start the frontend with "
                "--allow-request-chat-template",
                field="chat_template",
            )
        with naming_the_context(self.model_info.max_model_len):
            return own.render(
                messages,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                chat_template_kwargs=with_effort(chat_template_kwargs, reasoning_effort),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                parse_control_tokens=self.settings.parse_control_tokens_in_chat,
                max_tokens=self.model_info.max_model_len - 1,
            )

    def answer_format(
        self,
        rendered: RenderedChat,
        use: ToolUse,
        *,
        include_reasoning: bool = True,
        thinking_token_budget: int | None = None,
        constrained: bool = False,
    ) -> AnswerFormat | None:
        """How the answer to a rendered chat is taken apart; None: it is text and nothing else.

        Raises:
            InvalidArgumentError: the tools can't be called, or reasoning can't be bounded.
        """
        return answer_format(
            rendered,
            self.tokenizer,
            use,
            tool_call_parser=self.settings.tool_call_parser,
            reasoning_parser=self.settings.reasoning_parser,
            include_reasoning=include_reasoning,
            thinking_token_budget=thinking_token_budget,
            constrained=constrained,
        )

    async def start(self, request: GenerationRequest) -> RunningGeneration:
        """Checks a request, tokenises it and hands it to the engine.

        Raises:
            InvalidArgumentError: a field can't be served; the error names it.
            NotFoundError: no such model.
            AlreadyExistsError: the tenant has a live request with this id.
            ResourceExhaustedError, UnavailableError: the engine did not take it.
        """
        path = await self.find_model(request.model)
        self.check_generates()
        return await path._start(request)

    async def _start(self, request: GenerationRequest) -> RunningGeneration:
        if request.text_version is not None:
            _check_text_version(self.model_name, request.text_version, self.text_version)
        with phase("tokenize"):
            token_ids = await self.tokenize_prompt(request)
        params = self._ending_by_own_eos(request.sampling_params)
        if request.answer is not None:
            token_ids += request.answer.prompt_end
            params = request.answer.held_to(params)
        params = self.resolve(params, len(token_ids), request.default_max_tokens)
        prompt_only = request.prompt_only or params.max_tokens == 0
        if prompt_only:
            # An engine's last step for a prompt samples a token: it is produced, and told nobody.
            params = replace(params, max_tokens=1, best_of=None, logprobs=None)
        request_id = request.request_id or f"gen-{secrets.token_hex(8)}"
        key = (request.tenant, request_id)
        if key in self._live:
            raise AlreadyExistsError(
                f"a request with the id {request_id!r} is live; wait until it has ended",
                field="request_id",
            )
        self._live.add(key)
        picks_best = params.num_candidates > params.n
        try:
            engine_request = EngineRequest(
                request_id=f"{request_id}-{secrets.token_hex(4)}",
                prompt_token_ids=token_ids,
                sampling_params=params.for_candidates() if picks_best else params,
                tenant=request.tenant,
                priority=request.priority,
                adapter="" if self._adapter is None else self._adapter.info.name,
                adapter_version="" if self._adapter is None else self._adapter.info.version,
                # A stop string is looked for as tokens come, and a bound on reasoning counts them.
                whole=request.whole and not params.stop and request.answer is None,
                trace_headers=current_headers(),
            )
            stream, engine_request = await self._submit(engine_request)
        except BaseException as error:
            self._live.discard(key)
            if picks_best and isinstance(error, PagewireError):
                error.field = ENGINE_FIELD_NAMES.get(error.field, error.field)
            if isinstance(error, PagewireError) and error.field == "adapter":
                error.field = "model"
            if request.answer is not None:
                request.answer.name_constraint(error)
            raise
        return RunningGeneration(
            self, key, stream, engine_request, params, request.answer, prompt_only=prompt_only
        )

    async def _submit(self, request: EngineRequest) -> tuple[TokenStream, EngineRequest]:
        """Hands a request over; once more where its adapter has been replaced since it was known
        here, by one that reads the same tokens. Returns the request that was taken, too."""
        try:
            return await self.client.submit(request), request
        except FailedPreconditionError as error:
            if error.field != "adapter" or not request.adapter_version:
                raise
            await self.adapters.refresh()
            known = self.adapters.find(request.adapter)
            if known is None or known.info.version == request.adapter_version:
                raise
            _check_text_version(request.adapter, self.text_version, known.text_version)
            request = replace(request, adapter_version=known.info.version)
            return await self.client.submit(request), request

    def _ending_by_own_eos(self, params: SamplingParams) -> SamplingParams:
        """With the end token of the adapter's own tokenizer, if that is another than the model's:
        the engine knows the model's."""
        if self._adapter is None or self._tokenizer is None or params.ignore_eos:
            return params
        eos = self._tokenizer.eos_token_id
        if eos is None or eos in self.model_info.eos_token_ids or eos in params.stop_token_ids:
            return params
        return replace(params, stop_token_ids=(*params.stop_token_ids, eos))

    async def tokenize_prompt(self, request: GenerationRequest) -> list[int]:
        """The prompt's token ids, checked.

        Raises:
            InvalidArgumentError: there is no prompt, or an id is outside the model's vocabulary.
        """
        if request.prompt_token_ids is None:
            if request.prompt is None:
                raise InvalidArgumentError("prompt", "is missing: send text or token ids")
            return await encoded_text(
                request.prompt,
                self.tokenizer,
                self.model_info.max_model_len,
                add_special_tokens=request.add_special_tokens,
                parse_special_tokens=self.settings.parse_control_tokens_in_prompts,
            )
        return checked_token_ids(request.prompt_token_ids, self.model_info)

    def resolve(
        self, params: SamplingParams, prompt_tokens: int, default_max_tokens: int | None = None
    ) -> SamplingParams:
        """The parameters with `max_tokens` filled in, checked against this model.

        Raises:
            InvalidArgumentError: prompt and output do not fit, or a token id is out of range.
        """
        return resolved(
            params,
            prompt_tokens,
            self.model_info,
            has_tokenizer=self._tokenizer is not None,
            default_max_tokens=default_max_tokens,
        )

    def forget(self, key: tuple[str, str]) -> None:
        """The request has ended: its id may be used again."""
        self._live.discard(key)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a word to the engine without making the stream wait for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # an engine that can't be told has no such request any more


def _check_text_version(name: str, of_prompt: str, now: str) -> None:
    """A prompt in the tokens of one version is not for another that reads them otherwise."""
    if of_prompt != now:
        raise UnavailableError(
            f"the adapter {name!r} was replaced, by one with another tokenizer or chat template, "
            "while this request was on its way; send it again",
            field="model",
            retry_after_s=0.0,
        )
