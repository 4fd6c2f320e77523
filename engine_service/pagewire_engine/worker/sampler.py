"""From a step's logits to tokens: penalties, bias, filters, noise and log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.outputs import PositionLogprobs, TokenLogprob
from pagewire.sampling_params import SamplingParams
from pagewire_engine.step import SampledToken
from pagewire_engine.worker.grammar_masks import Masks
from pagewire_kernels.logprobs import raw_logprobs
from pagewire_kernels.sampling import (
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    RowParameters,
    load_token_chooser,
)
from pagewire_kernels.token_masks import TokenMasks


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One sequence that takes a token from the step.

    Attributes:
        sequence_id: the engine's number for it.
        row: its row of the logits; several sequences of one request may share a row.
        sequence_index: index within its request, part of the random counter.
        seed: the request's seed, the random key.
        params: the request's sampling parameters.
        prompt_token_ids: the prompt, for repetition_penalty.
        output_token_ids: tokens produced so far; their number is the output position.
    """

    sequence_id: int
    row: int
    sequence_index: int
    seed: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class Sampler:
    """Chooses a token for each row. Keeps no state between steps.

    A row's token is a function of its logits, its parameters, its tokens and (seed, sequence
    index, output position): the rows beside it change nothing.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: Collection[int], device: torch.device | str
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(i for i in set(eos_token_ids) if 0 <= i < vocab_size)
        self._device = torch.device(device)
        self.find_kernels()

    def find_kernels(self) -> None:
        """Takes the fastest kernel there is by now."""
        self._chooser = load_token_chooser(self._device)

    @property
    def num_eos_token_ids(self) -> int:
        """End-of-sequence ids of the model."""
        return len(self._eos_token_ids)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        masks: Masks | None = None,
        *,
        may_overwrite: bool = False,
    ) -> tuple[list[SampledToken], list[tuple[int, str]]]:
        """Samples one token for each entry of `rows`.

        Args:
            logits: [R, vocab_size] of any float dtype; left as they are, unless `may_overwrite`.
            rows: who samples from which row.
            masks: what those may sample that are constrained.
            may_overwrite: nobody reads the logits after this.

        Returns:
            The tokens in the order of `rows`, less those that failed; and (sequence id, why) of
            the failed: rows that hold NaN or +inf, or allow no token at all.
        """
        if not rows:
            return [], []
        logits = logits.float()
        in_place = may_overwrite and not any(row.params.logprobs is not None for row in rows)
        adjusted = self._adjust(logits, rows, masks, in_place=in_place)
        token_ids = self._choose(adjusted, rows, masks)
        if min(token_ids) < 0:
            failed = [
                (
                    row.sequence_id,
                    why_no_token(token_id, row.params, len(row.output_token_ids)),
                )
                for row, token_id in zip(rows, token_ids, strict=True)
                if token_id < 0
            ]
            rows = [row for row, token_id in zip(rows, token_ids, strict=True) if token_id >= 0]
            token_ids = [token_id for token_id in token_ids if token_id >= 0]
            return self._describe(logits, rows, token_ids), failed
        return self._describe(logits, rows, token_ids), []

    def _adjust(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        masks: Masks | None,
        *,
        in_place: bool,
    ) -> Tensor:
        """Logits [len(rows), V] after penalties, bias and min_tokens: `logits` itself if there is
        nothing to change or they may be written to, else a copy."""
        masked = masks.rows if masks is not None else {}
        sources = [row.row for row in rows]
        touched = any(self._changes_logits(row) for row in rows)
        are_all = sources == list(range(logits.shape[0]))
        adjusted = logits
        if not are_all or (touched and not in_place):
            adjusted = logits[self._integers(sources)]
        if touched:
            self._apply_penalties(adjusted, rows)
            self._apply_logit_bias(adjusted, rows)
            # A mask has taken them away already, where it leaves something else.
            self._suspend_stops(adjusted, rows, but=masked)
        return adjusted

    def _changes_logits(self, row: SamplingRow) -> bool:
        params = row.params
        return (
            params.has_penalties
            or bool(params.logit_bias)
            or len(row.output_token_ids) < params.min_tokens
        )

    def _apply_penalties(self, adjusted: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Repetition penalty over prompt and output, then frequency and presence over output.

        Only the logits of tokens that were seen are touched, in place.
        """
        indexes: list[int] = []
        token_ids: list[int] = []
        # Per entry: repetition penalty, and what frequency and presence take away.
        repetitions: list[float] = []
        subtracted: list[float] = []
        for index, row in enumerate(rows):
            params = row.params
            if not params.has_penalties:
                continue
            counts = Counter(row.output_token_ids)
            if params.repetition_penalty != 1.0:
                counts.update(dict.fromkeys(row.prompt_token_ids, 0))
            indexes += [index] * len(counts)
            token_ids += counts
            repetitions += [params.repetition_penalty] * len(counts)
            subtracted += [
                params.frequency_penalty * count + params.presence_penalty * (count > 0)
                for count in counts.values()
            ]
        if not token_ids:
            return
        where = (self._integers(indexes), self._integers(token_ids))
        seen = adjusted[where]
        factor = self._floats(repetitions)
        seen = torch.where(seen > 0, seen / factor, seen * factor)
        adjusted[where] = seen - self._floats(subtracted)

    def _apply_logit_bias(self, adjusted: Tensor, rows: Sequence[SamplingRow]) -> None:
        indexes: list[int] = []
        token_ids: list[int] = []
        biases: list[float] = []
        for index, row in enumerate(rows):
            indexes += [index] * len(row.params.logit_bias)
            token_ids += row.params.logit_bias
            biases += row.params.logit_bias.values()
        if token_ids:
            adjusted[self._integers(indexes), self._integers(token_ids)] += self._floats(biases)

    def _suspend_stops(
        self, adjusted: Tensor, rows: Sequence[SamplingRow], but: Container[int]
    ) -> None:
        """Removes what would end a sequence before its min_tokens, for all but those in `but`."""
        indexes: list[int] = []
        token_ids: list[int] = []
        for index, row in enumerate(rows):
            if row.sequence_id not in but and len(row.output_token_ids) < row.params.min_tokens:
                stops = set(row.params.stop_token_ids)
                if not row.params.ignore_eos:
                    stops.update(self._eos_token_ids)
                indexes += [index] * len(stops)
                token_ids += stops
        if token_ids:
            adjusted[self._integers(indexes), self._integers(token_ids)] = -math.inf

    def _choose(
        self, adjusted: Tensor, rows: Sequence[SamplingRow], masks: Masks | None
    ) -> list[int]:
        """Token ids, one a row of `adjusted`; of a row that has none what the chooser says."""
        allowed: TokenMasks | None = None
        if masks is not None and masks.rows:
            allowed = TokenMasks([masks.rows.get(row.sequence_id, -1) for row in rows], masks.words)
        chosen = self._chooser.choose(
            adjusted,
            RowParameters(
                temperatures=[row.params.temperature for row in rows],
                min_ps=[row.params.min_p for row in rows],
                top_ks=[self._top_k(row.params) for row in rows],
                top_ps=[row.params.top_p for row in rows],
                seeds=[row.seed for row in rows],
                sequence_indexes=[row.sequence_index for row in rows],
                positions=[len(row.output_token_ids) for row in rows],
            ),
            allowed,
        )
        return _as_ints(chosen)

    def _describe(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
    ) -> list[SampledToken]:
        """Adds the raw log probabilities to the rows that asked for them."""
        asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        positions: dict[int, PositionLogprobs] = {}
        if asked:
            counts = [rows[index].params.logprobs or 0 for index in asked]
            described = _position_logprobs(
                logits[self._integers([rows[index].row for index in asked])],
                self._integers([token_ids[index] for index in asked]),
                counts,
            )
            positions = dict(zip(asked, described, strict=True))
        return [
            SampledToken(
                sequence_id=row.sequence_id,
                token_id=token_ids[index],
                logprob=positions[index].token.logprob if index in positions else math.nan,
                logprobs=positions.get(index),
            )
            for index, row in enumerate(rows)
        ]

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def why_no_token(code: int, params: SamplingParams, num_output: int) -> str:
    """Why a row has no token.

    Args:
        code: what stands in its place, NOT_A_NUMBER or NOTHING_ALLOWED.
        params: its request's.
        num_output: its tokens before.
    """
    if code == NOTHING_ALLOWED and params.structured_output is not None:
        return "the model's logits are -inf for all that structured_output allows"
    if code == NOTHING_ALLOWED and num_output < params.min_tokens:
        return "min_tokens and stop_token_ids together allow no token"
    return "the model's logits are NaN or infinite"


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], num_top: int
) -> list[PositionLogprobs]:
    """Log probabilities of prompt tokens, raw as those of sampled ones.

    Args:
        logits: [T, vocab_size] of any float dtype; row t predicts `next_token_ids[t]`.
        next_token_ids: T ids.
        num_top: likeliest alternatives to report at each position.

    Returns:
        T entries.
    """
    if not next_token_ids:
        return []
    token_ids = torch.tensor(next_token_ids, dtype=torch.int64, device=logits.device)
    return _position_logprobs(logits.float(), token_ids, [num_top] * len(next_token_ids))


def split_by_health(
    logits: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[SamplingRow], list[tuple[int, str]]]:
    """The rows whose logits are numbers, and (sequence id, why) of the others."""
    # The largest value shows every fault: NaN spreads, +inf is above all, -inf has nothing above.
    largest = logits.amax(dim=-1).tolist()
    healthy: list[SamplingRow] = []
    failed: list[tuple[int, str]] = []
    for row in rows:
        value = largest[row.row]
        if math.isfinite(value):
            healthy.append(row)
        else:
            why = why_no_token(NOT_A_NUMBER, row.params, len(row.output_token_ids))
            failed.append((row.sequence_id, why))
    return healthy, failed


def _position_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[PositionLogprobs]:
    """One entry a row of `logits`, with as many alternatives as `counts` says for it."""
    columns = raw_logprobs(logits, token_ids, max(counts))
    return as_positions(_as_ints(token_ids), [column.tolist() for column in columns], counts)


def as_positions(
    token_ids: Sequence[int], columns: Sequence[Sequence[Any]], counts: Sequence[int]
) -> list[PositionLogprobs]:
    """What is told of N positions.

    Args:
        token_ids: the token at each.
        columns: what `raw_logprobs` returned, as lists.
        counts: alternatives to tell at each; as many as there are, or less.
    """
    logprobs, ranks, top_logprobs, top_ids = columns
    return [
        PositionLogprobs(
            token=TokenLogprob(token_id, logprobs[position], ranks[position]),
            top=[
                TokenLogprob(top_id, top_logprob, rank)
                for rank, (top_id, top_logprob) in enumerate(
                    zip(top_ids[position][:count], top_logprobs[position][:count], strict=True),
                    start=1,
                )
            ],
        )
        for position, (token_id, count) in enumerate(zip(token_ids, counts, strict=True))
    ]


def _as_ints(values: Tensor) -> list[int]:
    result: list[int] = values.tolist()
    return result
