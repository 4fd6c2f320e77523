"""The best n of a request's candidates (`best_of`).

They are ranked here and not in the engine: a stop string, which only text shows, may end one, and
what it produced after that must not count.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagewire.sampling_params import SamplingParams
from pagewire_frontend.generation_types import GenerationUpdate, TextDelta

# What the engine calls candidates, which are n sequences to it, is best_of to clients.
ENGINE_FIELD_NAMES: Mapping[str, str] = {"n": "best_of"}


class BestOf:
    """Holds the candidates of one request back until all have ended.

    Args:
        params: as the client gave them, with best_of above n.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._n = params.n
        self._with_logprobs = params.logprobs is not None
        self._candidates: dict[int, TextDelta] = {}
        self._texts: dict[int, list[str]] = {}

    def hold(self, update: GenerationUpdate) -> None:
        """Takes an update's deltas out of it."""
        for delta in update.deltas:
            self._texts.setdefault(delta.index, []).append(delta.text)
            held = self._candidates.get(delta.index)
            if held is not None:
                delta.token_ids = held.token_ids + delta.token_ids
                delta.logprobs = held.logprobs + delta.logprobs
            self._candidates[delta.index] = delta
        update.deltas = []

    def release(self, update: GenerationUpdate) -> None:
        """Puts the n with the highest cumulative log probability into the last update, best first,
        and counts the tokens of the others."""
        ranked = sorted(self._candidates.values(), key=lambda delta: -delta.cumulative_logprob)
        for index, delta in enumerate(ranked[: self._n]):
            delta.text = "".join(self._texts[delta.index])
            delta.index = index
            if not self._with_logprobs:
                delta.logprobs = []
            update.deltas.append(delta)
        update.discarded_tokens = sum(delta.num_tokens for delta in ranked[self._n :])
