"""From logits to tokens without a wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.outputs import PositionLogprobs
from pagewire_engine.step import Candidates
from pagewire_engine.worker.beam_candidates import beam_candidates
from pagewire_engine.worker.device_batch import DeviceBatch, KnownSequence
from pagewire_engine.worker.grammar_masks import Masks
from pagewire_engine.worker.sampler import SamplingRow, as_positions
from pagewire_engine.worker.staging import Download, Downloads, sent, to_device
from pagewire_engine.worker.step_layout import Rows
from pagewire_kernels.gpu.sampling import Epilogue, SamplingWorkspace, sample
from pagewire_kernels.gpu.sampling_logprobs import raw_logprobs
from pagewire_kernels.sampling import NOT_A_NUMBER
from pagewire_kernels.token_masks import forbidden


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities on their way to the host.

    Attributes:
        rows: which of the step's rows asked.
        counts: alternatives to tell for each.
        download: logprobs, ranks, then [rows, most] logprobs and ids of the likeliest; floats as
            their bits.
    """

    rows: list[int]
    counts: list[int]
    download: Download

    def take(self, tokens: Sequence[int]) -> dict[int, PositionLogprobs]:
        """Waits for them. Returns them by row; those of a row that failed mean nothing.

        Args:
            tokens: the step's, one a row.
        """
        numbers = self.download.take()
        count, most = len(self.rows), max(self.counts)
        logprobs, ranks, rest = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        top_logprobs, top_ids = rest.reshape(2, count, most)
        columns = (logprobs.view("f4"), ranks, top_logprobs.view("f4"), top_ids)
        told = as_positions(
            [tokens[row] for row in self.rows], [column.tolist() for column in columns], self.counts
        )
        return dict(zip(self.rows, told, strict=True))


class DeviceSampler:
    """Samples by what is told of each slot, and lets the sequences go on from their tokens."""

    def __init__(
        self,
        batch: DeviceBatch,
        vocab_size: int,
        num_eos_token_ids: int,
        max_rows: int,
        downloads: Downloads,
    ) -> None:
        self._batch = batch
        self._num_eos_token_ids = num_eos_token_ids
        self._downloads = downloads
        self._workspace = SamplingWorkspace(max_rows, vocab_size, batch.state.last_token.device)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        sampled: Tensor,
        holds: Tensor,
        logit_rows: Tensor,
    ) -> None:
        """Chooses a token for each row, and appends it to its sequence. Launches alone, the same
        whatever the rows hold.

        Args:
            logits: [L, V].
            slots: int32 [R]; PADDING where there is none.
            sampled: int32 [R], for the tokens; negative where there is none.
            holds: int32 [R], 1 where the sequence is left as it is.
            logit_rows: int32 [R], which logits each row reads.
        """
        state = self._batch.state
        sample(
            logits,
            slots,
            state.sampling,
            sampled,
            self._workspace,
            logit_rows=logit_rows,
            adjustments=self._batch.penalties.adjustments,
            epilogue=Epilogue(state.last_token, state.last_position, holds),
        )

    def sample_constrained(
        self,
        logits: Tensor,
        rows: Rows,
        masks: Masks,
        slots: Tensor,
        sampled: Tensor,
        logit_rows: Tensor | None,
    ) -> None:
        """Samples rows whose sequences were held, among what their masks allow.

        Args:
            logits: [L, V]; left as they are.
            rows: which of the step's rows, none of them refused.
            masks: theirs.
            slots: int32 [R], of all rows of the step.
            sampled: int32 [R], to be corrected.
            logit_rows: int32 [R], which logits each row of the step reads; None: its own.
        """
        device = logits.device
        index = to_device([row for row, _ in rows], device)
        own = logits.index_select(
            0, index if logit_rows is None else logit_rows.index_select(0, index)
        )
        # Unpacked there: packed there is an eighth of that to copy.
        away = forbidden(sent(masks.words, device), logits.shape[1])
        order = to_device([masks.rows[sequence.sequence_id] for _, sequence in rows], device)
        own.masked_fill_(away.index_select(0, order), -math.inf)
        tokens = torch.empty(len(rows), dtype=torch.int32, device=device)
        each = torch.arange(len(rows), dtype=torch.int32, device=device)
        self.sample(own, slots.index_select(0, index), tokens, torch.zeros_like(each), each)
        # What a mask hides may be no number either: the row was computed wrong.
        before = sampled.index_select(0, index)
        sampled.index_copy_(0, index, torch.where(before == NOT_A_NUMBER, before, tokens))

    def logprobs(
        self, logits: Tensor, rows: Rows, sampled: Tensor, logit_rows: Tensor | None
    ) -> PendingLogprobs | None:
        """Raw log probabilities of what was sampled, for the rows that asked."""
        asked = [
            (row, sequence.new.sampling_params.logprobs)
            for row, sequence in rows
            if sequence.new.sampling_params.logprobs is not None and not sequence.is_beam
        ]
        if not asked:
            return None
        index = to_device([row for row, _ in asked], logits.device)
        counts = [count or 0 for _, count in asked]
        columns = raw_logprobs(
            logits,
            sampled.index_select(0, index),
            max(counts),
            index if logit_rows is None else logit_rows.index_select(0, index),
        )
        numbers = torch.cat([_as_words(column) for column in columns])
        return PendingLogprobs([row for row, _ in asked], counts, self._downloads.begin(numbers))

    def candidates(
        self, logits: Tensor, rows: Rows, sources: Sequence[int]
    ) -> tuple[list[Candidates], list[tuple[int, str]]]:
        """What the beams among the rows may go on with; see `beam_candidates`. Waits for them."""
        beams = [sampling_row(sequence, sources[row]) for row, sequence in rows if sequence.is_beam]
        if not beams:
            return [], []
        return beam_candidates(logits, beams, self._num_eos_token_ids)


def _as_words(column: Tensor) -> Tensor:
    """int32 [N]: whole numbers as they are, others as their bits."""
    if column.dtype.is_floating_point:
        return column.float().contiguous().view(torch.int32).flatten()
    return column.int().flatten()


def sampling_row(sequence: KnownSequence, row: int) -> SamplingRow:
    """A sequence that samples from that row of logits, as the host's functions take it."""
    new = sequence.new
    return SamplingRow(
        sequence_id=new.sequence_id,
        row=row,
        sequence_index=new.sequence_index,
        seed=new.seed,
        params=new.sampling_params,
        prompt_token_ids=new.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
    )
