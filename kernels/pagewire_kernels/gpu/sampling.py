"""Sampling on the device: no sort, no word to the host, and rows that ignore one another.

The same tokens as pagewire_kernels/sampling.py. The best perturbed token of all is the answer if it
survives the filters. All filters keep the first tokens in the order of falling logits and rising
ids; so where it does not survive, all that come after it do not either, and the best perturbed one
of those before it is tried next. For top_p 0.95 that is 1.05 tries on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pagewire_kernels.gpu.launch import has_dependent_launch, launch
from pagewire_kernels.gpu.sampling_kernels import sampling_chunks, sampling_rows
from pagewire_kernels.gpu.sampling_penalties import Adjustments
from pagewire_kernels.sampling import MIN_TEMPERATURE, RowParameters, choose_where_possible
from pagewire_kernels.token_masks import TokenMasks

# The slot of a row that only fills a batch up.
PADDING = -1

_COLUMN_DTYPES = {
    "temperature": (torch.float32,),
    "min_p": (torch.float32,),
    "top_k": (torch.int32,),
    "top_p": (torch.float32, torch.float64),
    "seed": (torch.int64,),
    "sequence_index": (torch.int32,),
    "position": (torch.int32,),
}


@dataclass(frozen=True)
class SamplingColumns:
    """How sequences are sampled, by slot: device tensors [S].

    Attributes:
        temperature: float32; 0 is greedy.
        min_p: float32; 0 keeps all.
        top_k: int32; the vocabulary size or above keeps all.
        top_p: float32 or float64; 1 keeps all.
        seed: int64.
        sequence_index: int32, within the request.
        position: int32, tokens produced so far.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    sequence_index: Tensor
    position: Tensor

    def __post_init__(self) -> None:
        for name, dtypes in _COLUMN_DTYPES.items():
            column = getattr(self, name)
            if column.dtype not in dtypes or not column.is_contiguous():
                kinds = " or ".join(str(dtype) for dtype in dtypes)
                raise ValueError(f"{name} must be contiguous and of {kinds}")

    def pointers(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return tuple(getattr(self, name) for name in _COLUMN_DTYPES)


@dataclass(frozen=True)
class Epilogue:
    """What is written besides the tokens, by slot, where a row's sequence goes on.

    Its `position` among the sampling columns rises by 1, and a history of penalties counts the
    token.

    Attributes:
        last_token: int32 [S], set to the token; to 0 where there is none, so that a step launched
            before the failure is known reads a row that exists.
        last_position: int32 [S], raised by 1.
        holds: int32 [R], 1 where nothing is to be written; None: nowhere.
    """

    last_token: Tensor
    last_position: Tensor
    holds: Tensor | None = None


@dataclass(frozen=True)
class SamplingConfig:
    """How the work is cut; it decides the order of sums and so must not vary with the batch.

    Attributes:
        chunk: tokens of a program of the first kernel.
        chunk_warps: its warps.
        tile: tokens that a row's program of the second kernel looks at together.
        tile_warps: its warps.
        tile_registers: registers of a thread there, so that a multiprocessor holds two programs.
        stages: tiles in flight there.
    """

    chunk: int = 4096
    chunk_warps: int = 8
    tile: int = 4096
    tile_warps: int = 16
    tile_registers: int = 64
    stages: int = 2


# Neighbouring tokens of which the best is noted: what a filter leaves is found by it.
GROUP = 64


class SamplingWorkspace:
    """Scratch memory of one call at a time, for at most `max_rows` rows.

    Raises:
        ValueError: chunks or tiles that the kernels do not take.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        config: SamplingConfig | None = None,
    ) -> None:
        self.config = config or SamplingConfig()
        for size in (self.config.chunk, self.config.tile):
            if size < GROUP or size & (size - 1):
                raise ValueError(f"chunk and tile must be powers of two from {GROUP} on")
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.num_chunks: int = triton.cdiv(vocab_size, self.config.chunk)
        self.num_groups: int = triton.cdiv(vocab_size, GROUP)

        def scratch(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((max_rows, columns), dtype=dtype, device=device)

        self.chunk_best = scratch(self.num_chunks, torch.float32)
        self.chunk_best_id = scratch(self.num_chunks, torch.int32)
        self.chunk_winner = scratch(self.num_chunks, torch.int32)
        self.chunk_mass = scratch(self.num_chunks, torch.float32)
        self.group_best = scratch(self.num_groups, torch.float32)
        self.listed_groups = scratch(self.num_groups, torch.int32)


def sample(
    logits: Tensor,
    slots: Tensor,
    columns: SamplingColumns,
    out: Tensor,
    workspace: SamplingWorkspace,
    *,
    logit_rows: Tensor | None = None,
    adjustments: Adjustments | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    """Chooses a token for each row; two launches, the same whatever the rows hold.

    Args:
        logits: [L, V], any floating dtype; left as they are.
        slots: int32 [R], each row's slot; PADDING where there is none: nothing is done for it.
        columns: of all slots.
        out: int32 [R]: token ids; NOT_A_NUMBER where logits are NaN or +inf, NOTHING_ALLOWED where
            all are -inf. Rows of padding are left as they are.
        workspace: for this vocabulary and at least R rows.
        logit_rows: int32 [R], the row of logits that each row samples from; None: its own.
        adjustments: penalties and biases; None: there are none.
        epilogue: what else to write; None: nothing.

    Raises:
        ValueError: shapes or strides that the kernels do not read.
    """
    num_rows = slots.shape[0]
    vocab_size = logits.shape[1]
    _check(logits, num_rows, workspace, logit_rows)
    if num_rows == 0:
        return
    config = workspace.config
    shared = (
        logits,
        logits.stride(0),
        logit_rows,
        slots,
        columns.pointers(),
        adjustments.pointers() if adjustments is not None else None,
        workspace.chunk_best,
        workspace.chunk_best_id,
        workspace.chunk_winner,
        workspace.chunk_mass,
        workspace.group_best,
    )
    dependent = has_dependent_launch(logits.device)
    launch(
        sampling_chunks,
        (workspace.num_chunks, num_rows),
        *shared,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        CHUNK=config.chunk,
        GROUP=GROUP,
        DEPENDENT=dependent,
        num_warps=config.chunk_warps,
        dependent=dependent,
    )
    launch(
        sampling_rows,
        (num_rows,),
        *shared,
        workspace.listed_groups,
        out,
        epilogue.last_token if epilogue else None,
        epilogue.last_position if epilogue else None,
        epilogue.holds if epilogue else None,
        vocab_size,
        workspace.num_chunks,
        workspace.num_groups,
        CHUNKS=triton.next_power_of_2(workspace.num_chunks),
        GROUPS=triton.next_power_of_2(workspace.num_groups),
        GROUP=GROUP,
        TILE=config.tile,
        STAGES=config.stages,
        DEPENDENT=dependent,
        num_warps=config.tile_warps,
        maxnreg=config.tile_registers,
        dependent=dependent,
    )


def _check(
    logits: Tensor, num_rows: int, workspace: SamplingWorkspace, logit_rows: Tensor | None
) -> None:
    if logits.stride(1) != 1:
        raise ValueError("a row's logits must be contiguous")
    if logits.shape[1] != workspace.vocab_size:
        raise ValueError(
            f"the workspace is for {workspace.vocab_size} tokens, not {logits.shape[1]}"
        )
    if num_rows > workspace.max_rows:
        raise ValueError(f"{num_rows} rows, but the workspace is for {workspace.max_rows}")
    if logit_rows is None and num_rows > logits.shape[0]:
        raise ValueError(f"{num_rows} rows, but logits of {logits.shape[0]}")


class TritonChooser:
    """Token choice by the kernels, for callers that have parameters on the host."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._workspace: SamplingWorkspace | None = None

    def choose(
        self, logits: Tensor, parameters: RowParameters, masks: TokenMasks | None = None
    ) -> Tensor:
        """As TokenChooser says."""
        return choose_where_possible(self._choose, logits, parameters, masks)

    def _choose(self, logits: Tensor, parameters: RowParameters) -> Tensor:
        num_rows, vocab_size = logits.shape
        out = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        sample(
            logits,
            torch.arange(num_rows, dtype=torch.int32, device=self._device),
            self._columns(parameters),
            out,
            self._workspace_for(num_rows, vocab_size),
        )
        return out.long()

    def _columns(self, parameters: RowParameters) -> SamplingColumns:
        temperatures = [
            max(t, MIN_TEMPERATURE) if t > 0.0 else 0.0 for t in parameters.temperatures
        ]
        real = torch.tensor(
            [temperatures, parameters.min_ps, parameters.top_ps], dtype=torch.float64
        ).to(self._device)
        whole = torch.tensor(
            [
                parameters.seeds,
                parameters.top_ks,
                parameters.sequence_indexes,
                parameters.positions,
            ],
            dtype=torch.int64,
        ).to(self._device)
        return SamplingColumns(
            temperature=real[0].float(),
            min_p=real[1].float(),
            top_k=whole[1].int(),
            top_p=real[2],
            seed=whole[0],
            sequence_index=whole[2].int(),
            position=whole[3].int(),
        )

    def _workspace_for(self, num_rows: int, vocab_size: int) -> SamplingWorkspace:
        kept = self._workspace
        if kept is None or kept.vocab_size != vocab_size or kept.max_rows < num_rows:
            kept = SamplingWorkspace(num_rows, vocab_size, self._device)
            self._workspace = kept
        return kept
