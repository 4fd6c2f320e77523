"""The part of `LLM` whose answers are vectors and scores; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingParams, Task
from pagewire_frontend.generation import Generation
from pagewire_frontend.pooling import PooledPrompt, PoolingPrompt, PoolingRequest, pool
from pagewire_frontend.scoring import Scoring


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A vector: an embedding, or one number a class."""

    data: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text's embedding."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Probabilities of the classes.

    Attributes:
        probs: one a class.
        label: name of the likeliest.
    """

    probs: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well a text answers a query; higher is better."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt and its vector."""

    outputs: PoolingOutput
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A prompt and its classes."""

    outputs: ClassificationOutput
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair's score."""

    outputs: ScoringOutput


async def run_pooling(
    generation: Generation,
    prompts: Sequence[Any],
    params: PoolingParams,
    truncate_prompt_tokens: int | None,
    most_in_flight: int,
    use_tqdm: bool,
) -> list[PooledPrompt]:
    """One result a prompt, of which the engine has at most so many at a time.

    Raises:
        InvalidArgumentError: a prompt or a parameter can't be served. Nothing has run then.
        FailedPreconditionError: the model can't do this.
    """
    read = [_prompt(f"prompts[{n}]", prompt) for n, prompt in enumerate(prompts)]
    request = PoolingRequest(read, params, truncate_prompt_tokens, most_in_flight=most_in_flight)
    return await _with_progress(generation, request, use_tqdm)


async def run_scoring(
    generation: Generation,
    queries: Sequence[Any],
    texts: Sequence[Any],
    use_activation: bool | None,
    truncate_prompt_tokens: int | None,
    most_in_flight: int,
    use_tqdm: bool,
) -> list[ScoringRequestOutput]:
    """One result a text; for the errors see `run_pooling`."""
    if not texts:
        return []
    scoring = Scoring(
        generation.model_info,
        [_prompt(f"text_1[{n}]", query) for n, query in enumerate(queries)],
        [_prompt(f"text_2[{n}]", text) for n, text in enumerate(texts)],
        PoolingRequest(
            [],
            PoolingParams(task=Task.CLASSIFY, use_activation=use_activation),
            truncate_prompt_tokens,
            most_in_flight=most_in_flight,
        ),
    )
    pooled = await _with_progress(generation, scoring.request, use_tqdm)
    scores = scoring.scores([one.values for one in pooled])
    return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]


def classified(pooled: PooledPrompt, labels: Sequence[str]) -> ClassificationRequestOutput:
    """A vector with one number a class, with the name of the greatest."""
    likeliest = max(range(len(pooled.values)), key=pooled.values.__getitem__)
    output = ClassificationOutput(pooled.values, labels[likeliest])
    return ClassificationRequestOutput(output, pooled.token_ids)


async def _with_progress(
    generation: Generation, request: PoolingRequest, use_tqdm: bool
) -> list[PooledPrompt]:
    with tqdm(
        total=len(request.prompts), desc="Prompts", unit="prompt", disable=not use_tqdm
    ) as bar:
        return await pool(generation, request, bar.update)


def _prompt(name: str, given: Any) -> PoolingPrompt:
    if isinstance(given, str):
        return PoolingPrompt(name, text=given)
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InvalidArgumentError(
            name,
            f'must be text, {{"prompt": text}} or {{"prompt_token_ids": ids}}, not {given!r:.80}',
        )
    ((kind, value),) = given.items()
    if kind == "prompt" and isinstance(value, str):
        return PoolingPrompt(name, text=value)
    if kind != "prompt_token_ids" or not all(type(token_id) is int for token_id in value):
        raise InvalidArgumentError(
            name, "needs prompt, which is text, or prompt_token_ids, which are whole numbers"
        )
    return PoolingPrompt(name, token_ids=list(value))
