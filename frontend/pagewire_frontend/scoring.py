"""How well texts answer queries: by a cross-encoder, or as the cosine between embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.pooling import PoolingParams, Task, check_task
from pagewire_frontend.engine_client.base import ModelInfo
from pagewire_frontend.pooling import PoolingPrompt, PoolingRequest

QueryT = TypeVar("QueryT")


class Scoring:
    """Which prompts have to be pooled for scores, and the scores that come of their vectors.

    Args:
        info: the model's.
        queries: one for each text, or one for all.
        texts: what is scored.
        common: what the prompts have in common; its own prompts and task are not read.

    Attributes:
        request: to be pooled.

    Raises:
        FailedPreconditionError: the model can't score, or takes no token ids for it.
        InvalidArgumentError: there are neither one query nor as many as texts.
    """

    def __init__(
        self,
        info: ModelInfo,
        queries: Sequence[PoolingPrompt],
        texts: Sequence[PoolingPrompt],
        common: PoolingRequest,
    ) -> None:
        check_task(Task.SCORE, info.tasks, info.served_model_name)
        if len(queries) not in (1, len(texts)):
            raise InvalidArgumentError(
                "queries",
                f"{len(queries)} for {len(texts)} texts; give one for all, or one for each",
            )
        self._num_queries, self._num_texts = len(queries), len(texts)
        self._by_pairs = Task.CLASSIFY in info.tasks
        if self._by_pairs:
            params = PoolingParams(task=Task.CLASSIFY, use_activation=common.params.use_activation)
            pairs = _pairs(_one_each(queries, len(texts)), texts)
            self.request = replace(common, prompts=pairs, params=params)
        else:
            # The lengths fall out of a cosine; so it may as well be the dot product.
            params = PoolingParams(task=Task.EMBED, use_activation=True)
            self.request = replace(common, prompts=[*queries, *texts], params=params)

    def scores(self, vectors: Sequence[list[float]]) -> list[float]:
        """One a text, higher is better.

        Args:
            vectors: those of the request's prompts, in order.
        """
        if self._by_pairs:
            return [vector[0] for vector in vectors]
        queries = _one_each(vectors[: self._num_queries], self._num_texts)
        texts = vectors[self._num_queries :]
        return [cosine(a, b) for a, b in zip(queries, texts, strict=True)]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two vectors of one length; 0 where one of them is 0."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def _one_each(queries: Sequence[QueryT], count: int) -> Sequence[QueryT]:
    return list(queries) * count if len(queries) == 1 else queries


def _pairs(queries: Sequence[PoolingPrompt], texts: Sequence[PoolingPrompt]) -> list[PoolingPrompt]:
    pairs: list[PoolingPrompt] = []
    for query, text in zip(queries, texts, strict=True):
        if query.text is None or text.text is None:
            raise FailedPreconditionError(
                "this model scores pairs of texts, and takes no token ids for them", field=text.name
            )
        pairs.append(replace(text, text=query.text, second=text.text))
    return pairs
