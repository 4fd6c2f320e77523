"""Offline use: a model in this process, without servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pagewire.beam_search_params import BeamSearchParams
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.lora import LoRARequest
from pagewire.pooling import PoolingParams, Task
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.engine_client.base import EngineClient
from pagewire_frontend.generation_types import GenerationRequest
from pagewire_frontend.llm_inputs import (
    Messages,
    Prompt,
    conversations_of,
    engine_config,
    listed_prompts,
    params_for_each,
    prioritised,
    prompt_request,
)
from pagewire_frontend.llm_model import OfflineModel, most_in_flight
from pagewire_frontend.llm_outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    beam_search_output,
)
from pagewire_frontend.llm_pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    classified,
    run_pooling,
    run_scoring,
)
from pagewire_frontend.llm_run import naming
from pagewire_frontend.pooling import PooledPrompt
from pagewire_frontend.template_files import load_chat_template
from pagewire_frontend.tokenizer import Tokenizer
from pagewire_frontend.tool_choice import ToolUse, fitting, tool_use

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "load_chat_template",
]


class LLM:
    """A model, loaded in this process.

        with LLM(model="HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Its methods may be called from any thread, and from within a running event loop.

    Args:
        model: model folder, GGUF file, or hub name.
        chat_template: a template's text (see `load_chat_template`) in place of the model's own.
        engine_settings: the fields of `pagewire.config.EngineConfig`, such as `dtype`, `seed` or
            `max_model_len`.

    Raises:
        InvalidArgumentError: a setting that does not exist, or has a value that can't be used.
        PagewireError: the model can't be loaded; the error says why.
    """

    def __init__(
        self, model: str, *, chat_template: str | None = None, **engine_settings: Any
    ) -> None:
        config = engine_config(model, engine_settings)
        if importlib.util.find_spec("torch") is None:
            raise FailedPreconditionError("LLM needs torch: pip install 'pagewire[engine]'")
        # Imported here: it brings the engine and torch along.
        from pagewire_frontend.engine_client.in_process import InProcessEngineClient

        client = InProcessEngineClient(config)
        self._model = OfflineModel(client, chat_template, most_in_flight(config))

    @classmethod
    def from_client(cls, client: EngineClient, *, chat_template: str | None = None) -> LLM:
        """The same over an engine that is reached in another way. The client is started here, and
        closed by `shutdown`."""
        llm = cls.__new__(cls)
        llm._model = OfflineModel(client, chat_template)
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt.

        Args:
            prompts: text, {"prompt": text} or {"prompt_token_ids": ids}; one, or a list of any.
            sampling_params: for all prompts, or one for each. None: the model's own defaults.
                `max_tokens` None stands for 16 here, or the rest of the context if that is less.
            priority: for all prompts, or one for each; lower runs first.
            lora_request: the adapter for all prompts, which is loaded if its folder holds what is
                not loaded yet. The LLM was made with `enable_lora=True`.
            use_tqdm: show progress, with input and output tokens per second.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            InvalidArgumentError: a prompt or a parameter can't be served. Nothing has run then.
        """
        listed = listed_prompts(prompts)
        params = self._params_for(sampling_params, len(listed))
        requests = [prompt_request(prompt, f"prompts[{n}]") for n, prompt in enumerate(listed)]
        model = self._model.path_of(lora_request).model_name
        requests = [replace(request, model=model) for request in requests]
        return self._model.run_requests(prioritised(requests, priority), params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Looks for the likeliest continuations of each prompt.

        Args:
            prompts: as for `generate`.
            params: for all prompts. `max_tokens` None stands for 16 here, or the rest of the
                context if that is less.
            lora_request: as for `generate`.
            use_tqdm: show progress.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            InvalidArgumentError: a prompt or a parameter can't be served. Nothing has run then.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgumentError("params", "must be BeamSearchParams")
        outputs = self.generate(
            prompts, params.as_sampling_params(), lora_request=lora_request, use_tqdm=use_tqdm
        )
        name = "" if lora_request is None else lora_request.lora_name
        tokenizer = self._model.generation.for_model(name).tokenizer_or_none
        return [beam_search_output(output, tokenizer) for output in outputs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        fit_max_tokens: bool | None = None,
        reasoning_effort: str | None = None,
        parse_answer: bool = False,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several.

        Args:
            messages: OpenAI-shaped messages; one conversation, or a list of them.
            sampling_params: as for `generate`; `max_tokens` None: the rest of the context.
            priority: as for `generate`.
            lora_request: as for `generate`; a chat template that the adapter ships is used.
            chat_template: a template's text, or the name of one of the model's, for this call.
            add_generation_prompt: open the assistant's turn; None: unless the last message is
                continued.
            continue_final_message: go on with the last message.
            chat_template_kwargs: more variables for the template.
            tools: definitions for the template, OpenAI-shaped.
            tool_choice: "none", "auto", "required", a named function or some allowed ones, as over
                HTTP; needs `parse_answer`.
            parallel_tool_calls: False: one call at most; needs `parse_answer`.
            fit_max_tokens: False: `max_tokens` may cut the calls that `tool_choice` demands. Of
                other constraints `StructuredOutput` says it.
            reasoning_effort: for templates that read it; "none" asks for no reasoning.
            parse_answer: take the answer apart: an output's `text` is then what is neither
                reasoning nor a call. Otherwise it is all that the model wrote.

        Returns:
            One output a conversation, in order; its `prompt` is the rendered text.

        Raises:
            InvalidArgumentError: a conversation or a parameter can't be served. Nothing has run.
        """
        self._model.check_open()
        conversations = conversations_of(messages)
        params = self._params_for(sampling_params, len(conversations))
        generation = self._model.path_of(lora_request)
        for name, given in (
            ("tool_choice", tool_choice),
            ("parallel_tool_calls", parallel_tool_calls),
            ("fit_max_tokens", fit_max_tokens),
        ):
            if given is not None and not parse_answer:
                raise InvalidArgumentError(name, "needs parse_answer=True")
        use = ToolUse()
        if parse_answer:
            use = fitting(tool_use(tools, tool_choice, parallel_tool_calls), fit_max_tokens)
        requests = []
        for n, conversation in enumerate(conversations):
            with naming(f"conversation {n}"):
                rendered = generation.render_chat(
                    conversation,
                    tools=use.shown_tools if parse_answer else tools,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    reasoning_effort=reasoning_effort,
                )
                answer = None
                if parse_answer:
                    answer = generation.answer_format(
                        rendered, use, constrained=params[n].structured_output is not None
                    )
            requests.append(
                GenerationRequest(
                    prompt=rendered.prompt,
                    prompt_token_ids=rendered.prompt_token_ids(),
                    model=generation.model_name,
                    answer=answer,
                )
            )
        return self._model.run_requests(prioritised(requests, priority), params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, of a model that embeds (see `runner` in EngineConfig).

        Args:
            prompts: as for `generate`.
            pooling_params: length and scaling of the vectors. None: the model's own.
            truncate_prompt_tokens: keep the first so many tokens of each prompt; -1: as many as the
                model takes. None: one that is too long is refused.
            use_tqdm: show progress.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            InvalidArgumentError: a prompt or a parameter can't be served. Nothing has run then.
            FailedPreconditionError: the model gives no embeddings.
        """
        params = pooling_params or PoolingParams()
        if params.task is not Task.EMBED:
            raise InvalidArgumentError("pooling_params", "must have the task embed")
        pooled = self._pool(prompts, params, truncate_prompt_tokens, use_tqdm)
        return [
            EmbeddingRequestOutput(EmbeddingOutput(one.values), one.token_ids) for one in pooled
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the model's classes for each prompt.

        Args:
            prompts, truncate_prompt_tokens, use_tqdm: as for `embed`.
            use_activation: False: the model's logits. None: what its files say.

        Raises:
            InvalidArgumentError, FailedPreconditionError: see `embed`.
        """
        params = PoolingParams(task=Task.CLASSIFY, use_activation=use_activation)
        pooled = self._pool(prompts, params, truncate_prompt_tokens, use_tqdm)
        info = self._model.generation.model_info.pooling
        labels = () if info is None else info.labels
        return [classified(one, labels) for one in pooled]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """The vector that the model gives for each prompt, whatever it is.

        Args:
            prompts, truncate_prompt_tokens, use_tqdm: as for `embed`.
            pooling_params: what is made of it. None: what the model was made for.

        Raises:
            InvalidArgumentError, FailedPreconditionError: see `embed`.
        """
        self._model.check_open()
        if pooling_params is None:
            classifies = Task.CLASSIFY in self._model.generation.model_info.tasks
            pooling_params = PoolingParams(task=Task.CLASSIFY if classifies else Task.EMBED)
        pooled = self._pool(prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [PoolingRequestOutput(PoolingOutput(one.values), one.token_ids) for one in pooled]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts answer queries: by a cross-encoder, or as the cosine of embeddings.

        Args:
            text_1: a query for all texts, or one for each.
            text_2: the texts.
            use_activation: False: a cross-encoder's logits. None: what its files say.
            truncate_prompt_tokens, use_tqdm: as for `embed`; of a pair the text is cut.

        Returns:
            One output a text, in the order of the texts.

        Raises:
            InvalidArgumentError, FailedPreconditionError: see `embed`.
        """
        self._model.check_open()
        return self._model.run(
            run_scoring(
                self._model.generation,
                listed_prompts(text_1),
                listed_prompts(text_2),
                use_activation,
                truncate_prompt_tokens,
                self._model.most_in_flight,
                use_tqdm,
            )
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        self._model.check_open()
        return self._model.generation.tokenizer

    def shutdown(self) -> None:
        """Unloads the model. Safe to call twice."""
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            self._model.check_open()
            params = self._model.generation.model_info.default_sampling_params
        return params_for_each(params, count)

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[PooledPrompt]:
        self._model.check_open()
        return self._model.run(
            run_pooling(
                self._model.generation,
                listed_prompts(prompts),
                params,
                truncate_prompt_tokens,
                self._model.most_in_flight,
                use_tqdm,
            )
        )
