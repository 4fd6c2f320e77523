"""A step that was launched on a device, and what becomes of it when it has landed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagewire.errors import UnavailableError
from pagewire.outputs import PositionLogprobs
from pagewire_engine.step import Candidates, PromptLogprobsChunk, SampledToken, StepResult
from pagewire_engine.worker.device_batch import KnownSequence
from pagewire_engine.worker.device_sampler import PendingLogprobs
from pagewire_engine.worker.sampler import why_no_token
from pagewire_engine.worker.staging import Download


@dataclass(slots=True)
class DeviceStep:
    """Implements PendingStep.

    Attributes:
        step: its number.
        sequences: who samples, in the plan's order.
        download: their tokens, once the device has computed the step; a beam's means nothing.
        logprobs: of those that asked.
        prompt_logprobs, candidates, failed_beams, refused: parts of the result that are known.
    """

    step: int
    sequences: Sequence[KnownSequence] = ()
    download: Download | None = None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    failed_beams: list[tuple[int, str]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    _landed: StepResult | None = None
    _failure: UnavailableError | None = None

    def result(self) -> StepResult:
        if self._failure is not None:
            raise self._failure
        if self._landed is None:
            try:
                self._landed = self._land()
            except Exception as error:
                # What was launched behind it goes on from what it made: nothing can be tried again.
                message = f"the device failed in step {self.step}: {error}"
                self._failure = UnavailableError(message)
                raise self._failure from error
        return self._landed

    def _land(self) -> StepResult:
        """Waits for the tokens, and appends them to their sequences."""
        tokens: list[int] = [] if self.download is None else self.download.take().tolist()
        positions = {} if self.logprobs is None else self.logprobs.take(tokens)
        if self.candidates or self.failed_beams or self.refused or (tokens and min(tokens) < 0):
            sampled, failed = self._apart(tokens, positions)
            return StepResult(
                self.step, sampled, self.prompt_logprobs, failed, self.candidates, self.refused
            )
        for sequence, token_id in zip(self.sequences, tokens, strict=True):
            sequence.output_token_ids.append(token_id)
        sampled = [
            SampledToken(sequence.sequence_id, token_id, math.nan)
            for sequence, token_id in zip(self.sequences, tokens, strict=True)
        ]
        for index, told in positions.items():
            sampled[index].logprob, sampled[index].logprobs = told.token.logprob, told
        return StepResult(self.step, sampled, self.prompt_logprobs)

    def _apart(
        self, tokens: list[int], positions: dict[int, PositionLogprobs]
    ) -> tuple[list[SampledToken], list[tuple[int, str]]]:
        """Sampled and failed, where beams, failures or refusals are among the rows."""
        sampled: list[SampledToken] = []
        refused = dict(self.refused)
        failed = list(self.failed_beams)
        for index, (sequence, token_id) in enumerate(zip(self.sequences, tokens, strict=True)):
            if sequence.is_beam:
                continue
            # Of a failed one any token: the next step may be on its way and count on one.
            sequence.output_token_ids.append(max(token_id, 0))
            if sequence.sequence_id in refused:
                continue
            if token_id < 0:
                num_before = len(sequence.output_token_ids) - 1
                why = why_no_token(token_id, sequence.new.sampling_params, num_before)
                failed.append((sequence.sequence_id, why))
                continue
            told = positions.get(index)
            logprob = math.nan if told is None else told.token.logprob
            sampled.append(SampledToken(sequence.sequence_id, token_id, logprob, told))
        return sampled, failed
