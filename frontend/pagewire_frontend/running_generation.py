"""A request that runs: from the engine's tokens to the text of its sequences."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire_frontend.answer_format import AnswerFormat, AnswerParser
from pagewire_frontend.best_of import ENGINE_FIELD_NAMES, BestOf
from pagewire_frontend.engine_client.base import EngineRequest, TokenDelta, TokenStream
from pagewire_frontend.finished import FinishedGeneration, collect
from pagewire_frontend.generation_types import GenerationUpdate, TextDelta
from pagewire_frontend.phase_times import PhaseTimes
from pagewire_frontend.reasoning_budget import ReasoningBudget
from pagewire_frontend.sequence_text import SequenceText

if TYPE_CHECKING:
    from pagewire_frontend.generation import Generation


class RunningGeneration:
    """A live request: an async iterator of GenerationUpdate.

    Iterate it to its end, or call `aclose`, which aborts what still runs. A cancelled or failed
    iteration aborts by itself.
    """

    def __init__(
        self,
        generation: Generation,
        key: tuple[str, str],
        stream: TokenStream,
        request: EngineRequest,
        params: SamplingParams,
        answer: AnswerFormat | None,
        *,
        prompt_only: bool = False,
    ) -> None:
        self.request_id = key[1]
        self.prompt_token_ids = request.prompt_token_ids
        self._request = request
        self._generation = generation
        self._key = key
        self._stream = stream
        self._deltas = aiter(stream)
        self._best_of: BestOf | None = None
        if params.num_candidates > params.n:
            self._best_of = BestOf(params)
            params = params.for_candidates()
        self._sequences = [
            SequenceText(
                index,
                generation.tokenizer_or_none,
                request.prompt_token_ids,
                params,
                generation.model_info.eos_token_ids,
                frozenset() if answer is None else answer.shown_tokens,
            )
            for index in range(params.n)
        ]
        self._prompt_only = prompt_only
        self._answer = answer
        self._answers: dict[int, AnswerParser] = {}
        self._budget: ReasoningBudget | None = None
        if answer is not None and answer.thinking_token_budget is not None and not prompt_only:
            self._budget = ReasoningBudget(answer, params)
        self._unfinished = params.n
        self._next_prompt_position = 1
        self._times = PhaseTimes()
        self._past_resumptions = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while not self._ended:
            try:
                if self._budget is not None and self._budget.spent:
                    await self._go_on_after_reasoning(self._budget)
                update = self._update(await anext(self._deltas))
            except StopAsyncIteration:
                self._end()
                break
            except BaseException as error:
                self._end()
                self._generation.in_background(self._stream.abort())
                if self._best_of is not None and isinstance(error, PagewireError):
                    error.field = ENGINE_FIELD_NAMES.get(error.field, error.field)
                if self._answer is not None:
                    self._answer.name_constraint(error)
                raise
            if update is not None:
                return update
        raise StopAsyncIteration

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return self._unfinished

    async def aclose(self) -> None:
        """Aborts what still runs. Safe to call twice and after the end."""
        if not self._ended:
            self._end()
            await self._stream.abort()

    async def collect(self) -> FinishedGeneration:
        """Reads to the end. Raises what the request failed with."""
        return await collect(self)

    def _update(self, deltas: list[TokenDelta]) -> GenerationUpdate | None:
        update = GenerationUpdate([])
        ended_here = False
        for delta in deltas:
            sequence = self._sequences[delta.sequence_index]
            if delta.prompt_logprobs:
                self._take_prompt_logprobs(update, delta)
            if sequence.finished:
                continue
            if self._budget is None:
                text_delta = sequence.advance(delta)
            else:
                text_delta = self._budget.advance(sequence, delta)
            if self._prompt_only:
                if sequence.finished:
                    update.deltas.append(_end_alone(text_delta))
            elif text_delta.token_ids or sequence.finished:
                update.deltas.append(text_delta)
            if delta.times is not None:
                self._times.take(delta.times, is_end=delta.finish_reason is not None)
            if sequence.finished:
                self._unfinished -= 1
                ended_here = sequence.stopped_by_string and delta.finish_reason is None
                if ended_here:
                    self._generation.in_background(
                        self._stream.finish_sequence(delta.sequence_index)
                    )
        if self._best_of is not None:
            self._best_of.hold(update)
            if not self._unfinished:
                self._best_of.release(update)
        if self._answer is not None:
            for text_delta in update.deltas:
                self._take_apart(text_delta, self._answer)
        if not self._unfinished:
            num_tokens = max(sequence.num_tokens for sequence in self._sequences)
            times = self._times.final(num_tokens=num_tokens, ended_here=ended_here)
            resumptions = self._past_resumptions + self._stream.resumptions
            update.times = replace(times, resumptions=resumptions) if resumptions else times
            self._end()
        return update if update.deltas or update.prompt_logprobs else None

    async def _go_on_after_reasoning(self, budget: ReasoningBudget) -> None:
        """Hands the request over again, from where the budget ended its reasoning. It is aborted
        after that: until then it keeps the adapter, which may be on its way out, and the grammar
        in the engine."""
        client_id = self._request.request_id.rpartition("-")[0]
        self._request = replace(
            self._request,
            request_id=f"{client_id}-{secrets.token_hex(4)}",
            past=budget.take_past(),
        )
        stream = await self._generation.client.submit(self._request)
        self._generation.in_background(self._stream.abort())
        self._past_resumptions += self._stream.resumptions
        self._stream = stream
        self._deltas = aiter(self._stream)

    def _take_apart(self, delta: TextDelta, answer: AnswerFormat) -> None:
        parser = self._answers.get(delta.index)
        if parser is None:
            parser = self._answers[delta.index] = AnswerParser(answer)
        parser.apply(delta)

    def _take_prompt_logprobs(self, update: GenerationUpdate, delta: TokenDelta) -> None:
        known = self._next_prompt_position - delta.prompt_logprobs_start
        new = delta.prompt_logprobs[max(known, 0) :]
        self._next_prompt_position += len(new)
        update.prompt_logprobs += new

    def __del__(self) -> None:
        # Dropped by a reader that did not close it: its stream ends itself; the id is free again.
        if not self._ended:
            self._generation.forget(self._key)

    def _end(self) -> None:
        self._ended = True
        self._generation.forget(self._key)


def _end_alone(delta: TextDelta) -> TextDelta:
    """That a sequence has ended, and nothing of what it produced."""
    reason = delta.finish_reason
    if reason is FinishReason.STOP:
        reason = FinishReason.LENGTH
    return TextDelta(delta.index, "", [], finish_reason=reason)
