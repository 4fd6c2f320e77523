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
        """Takes an update's deltas out of it. Log probabilities, which are there for the ranking,
        are kept only for a client that asked for them: they weigh much more than tokens."""
        for delta in update.deltas:
            held = self._candidates.get(delta.index)
            if held is None:
                held = self._candidates[delta.index] = TextDelta(delta.index, "", [])
                self._texts[delta.index] = []
            self._texts[delta.index].append(delta.text)
            held.token_ids += delta.token_ids
            if self._with_logprobs:
                held.logprobs += delta.logprobs
            held.finish_reason = delta.finish_reason
            held.stop_reason = delta.stop_reason
            held.num_tokens = delta.num_tokens
            held.cumulative_logprob = delta.cumulative_logprob
        update.deltas = []

    def release(self, update: GenerationUpdate) -> None:
        """Puts the n with the highest cumulative log probability into the last update, best first,
        and counts the tokens of the others."""
        ranked = sorted(self._candidates.values(), key=lambda delta: -delta.cumulative_logprob)
        for index, delta in enumerate(ranked[: self._n]):
            delta.text = "".join(self._texts[delta.index])
            delta.index = index
            update.deltas.append(delta)
        update.discarded_tokens = sum(delta.num_tokens for delta in ranked[self._n :])
