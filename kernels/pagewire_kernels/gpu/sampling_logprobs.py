"""Log probabilities on the device: no sort of the vocabulary and no word to the host."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.gpu.launch import (
    gdc_launch_dependents,
    gdc_wait,
    has_dependent_launch,
    launch,
)

# Tokens of a program: fixed, so that no sum depends on the batch.
_CHUNK = 4096
# Neighbouring tokens of which the best stands for all in the first of two selections.
_GROUP = 64
_LOG2E = tl.constexpr(1.4426950408889634)
_MASK32 = 0xFFFFFFFF


def raw_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As logprobs.raw_logprobs, of logits as they are; everything stays on the device.

    Args:
        logits: [L, V], any floating dtype.
        token_ids: int32 or int64 [N], the token at each position; a negative one, which stands
            for no token, is taken for 0.
        num_top: likeliest tokens to name as well, cut to V.
        rows: int32 or int64 [N], the row of logits of each position; None: its own.

    Returns:
        logprobs [N] and ranks int64 [N] (1 = likeliest) of `token_ids`, logprobs [N, num_top] and
        ids int64 [N, num_top] of the likeliest in falling order, the lower id first among equals.
    """
    count, vocab_size = token_ids.shape[0], logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, _CHUNK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    bests, masses = scratch(count, num_chunks), scratch(count, num_chunks)
    better = scratch(count, num_chunks, dtype=torch.int32)
    logprobs, normalisers = scratch(count), scratch(count, 2)
    ranks = scratch(count, dtype=torch.int64)
    dependent = has_dependent_launch(logits.device)
    launch(
        logprobs_chunks,
        (num_chunks, count),
        logits,
        logits.stride(0),
        rows,
        token_ids,
        bests,
        masses,
        better,
        vocab_size,
        num_chunks,
        CHUNK=_CHUNK,
        DEPENDENT=dependent,
        num_warps=8,
        dependent=dependent,
    )
    launch(
        logprobs_rows,
        (count,),
        logits,
        logits.stride(0),
        rows,
        token_ids,
        bests,
        masses,
        better,
        logprobs,
        ranks,
        normalisers,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        DEPENDENT=dependent,
        num_warps=1,
        dependent=dependent,
    )
    asked = logits[:count] if rows is None else logits.index_select(0, rows)
    top, top_ids = top_tokens(asked, num_top)
    return logprobs, ranks, top - normalisers[:, :1] - normalisers[:, 1:], top_ids


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in falling order, the lower id first among equals.

    They lie in the `count` groups of neighbours that come first by their best (among equals, by
    their place): before each token of another group come the bests of all of those.

    Args:
        logits: [N, V], any floating dtype, no NaN.
        count: cut to V.

    Returns:
        Values float32 [N, count] and int64 ids [N, count].
    """
    num_rows, vocab_size = logits.shape
    count = min(count, vocab_size)
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % _GROUP), value=float("-inf"))
    groups = padded.view(num_rows, -1, _GROUP)
    places = torch.arange(groups.shape[1], device=logits.device)
    chosen = _first(groups.amax(dim=-1), places.expand(num_rows, -1), count)
    members = torch.arange(_GROUP, device=logits.device)
    token_ids = (chosen[:, :, None] * _GROUP + members).flatten(1)
    top_ids = _first(padded.gather(1, token_ids), token_ids, count)
    return padded.gather(1, top_ids).float(), top_ids


def _first(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """The ids of the first `count` (or all) of each row, by falling value and rising id."""
    # As integers that rise with the value; adding 0 makes one of both zeros.
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.long() << 32) + (_MASK32 - ids)
    top = keys.topk(min(count, keys.shape[1]), dim=-1).values
    return _MASK32 - (top & _MASK32)


@triton.jit
def logprobs_chunks(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    bests: tl.tensor,
    masses: tl.tensor,
    better: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: (chunk, position): the chunk's best, its mass, and how many beat the token."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    position = tl.program_id(1)
    source, token, own = _open(logits, row_stride, rows, token_ids, position)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    found = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.max(found)
    base = tl.where(best > float("-inf"), best, 0.0)
    beats = (found > own) | ((found == own) & (ids < token))
    entry = position * num_chunks + chunk
    tl.store(bests + entry, best)
    tl.store(masses + entry, tl.sum(tl.exp2((found - base) * _LOG2E)))
    tl.store(better + entry, tl.sum(beats.to(tl.int32)))


@triton.jit
def logprobs_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    bests: tl.tensor,
    masses: tl.tensor,
    better: tl.tensor,
    logprobs: tl.tensor,
    ranks: tl.tensor,
    normalisers: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: positions. Normalisers: the best logit, and the log of the mass relative to it."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.program_id(0)
    _, _, own = _open(logits, row_stride, rows, token_ids, position)
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    entry = position * num_chunks + chunk
    parts = tl.load(bests + entry, mask=inside, other=float("-inf"))
    best = tl.max(parts)
    mass = tl.load(masses + entry, mask=inside, other=0.0)
    log_mass = tl.log(tl.sum(mass * tl.exp2((parts - best) * _LOG2E)))
    tl.store(logprobs + position, own - best - log_mass)
    count = tl.sum(tl.load(better + entry, mask=inside, other=0))
    tl.store(ranks + position, count.to(tl.int64) + 1)
    tl.store(normalisers + 2 * position, best)
    tl.store(normalisers + 2 * position + 1, log_mass)


@triton.jit
def _open(
    logits: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    position: tl.tensor,
) -> Any:
    """Pointer to a position's logits, its token and that token's logit."""
    row = position
    if rows is not None:
        row = tl.load(rows + position)
    source = logits + row.to(tl.int64) * row_stride
    token = tl.maximum(tl.load(token_ids + position), 0)
    return source, token, tl.load(source + token).to(tl.float32)
