"""The two kernels of sampling; what they do is said in sampling.py.

The first looks at each row in chunks of fixed size: the best logit, and for rows that are not
greedy the best perturbed token, the mass (sum of probabilities relative to the best), and the best
of each group of neighbouring tokens. The second has one program a row. Where there are filters it
works on a list of groups, those whose best reaches a bound (`sampling_groups`), so that for top_k
and on peaked logits few tokens are looked at again.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pagewire_kernels.gpu.launch import gdc_launch_dependents, gdc_wait
from pagewire_kernels.gpu.sampling_groups import (
    list_groups,
    mass_within,
    preceding,
    race,
    reached_by,
)
from pagewire_kernels.gpu.sampling_noise import exponential, words_of_quads, words_of_tokens
from pagewire_kernels.gpu.sampling_penalties import count_token, load_logits, open_adjustment
from pagewire_kernels.sampling import MIN_TEMPERATURE, NOT_A_NUMBER, NOTHING_ALLOWED

_LOG2E = tl.constexpr(1.4426950408889634)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)


@triton.jit
def _source(logits: tl.tensor, row_stride: tl.tensor, logit_rows: tl.tensor, row: tl.tensor) -> Any:
    """Pointer to the logits that a row samples from."""
    source = row
    if logit_rows is not None:
        source = tl.load(logit_rows + row)
    return logits + source.to(tl.int64) * row_stride


@triton.jit
def sampling_chunks(
    logits: tl.tensor,
    row_stride: tl.tensor,
    logit_rows: tl.tensor,
    slots: tl.tensor,
    columns: tl.tuple,
    adjustments: tl.tuple,
    chunk_best: tl.tensor,
    chunk_best_id: tl.tensor,
    chunk_winner: tl.tensor,
    chunk_mass: tl.tensor,
    group_best: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: (chunk, row). Arguments as those of `sample`, or parts of them."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        temperature, min_p, top_k, top_p, seed, sequence_index, position = columns
        source = _source(logits, row_stride, logit_rows, row)
        adjustment = None
        if adjustments is not None:
            adjustment = open_adjustment(adjustments, slot, tl.load(position + slot), vocab_size)
        quads = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        token_ids = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
        found = load_logits(source, token_ids, token_ids < vocab_size, adjustment)
        # NaN is not below +inf either.
        healthy = found < float("inf")
        found = tl.where(healthy, found, float("-inf"))
        best = tl.max(found)
        best_id = tl.min(tl.where(found == best, token_ids, vocab_size))
        sick = tl.min(healthy.to(tl.int32)) == 0
        entry = row * num_chunks + chunk
        tl.store(chunk_best + entry, tl.where(sick, float("inf"), best))
        tl.store(chunk_best_id + entry, best_id)
        heat = tl.load(temperature + slot)
        if heat > 0:
            all_by_count = tl.load(top_k + slot) >= vocab_size
            filtered = (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0)
            if filtered | (all_by_count == 0):
                in_groups = tl.max(tl.reshape(found, (CHUNK // GROUP, GROUP)), axis=1)
                groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
                tl.store(
                    group_best + row * num_groups + groups, in_groups, mask=groups < num_groups
                )
            if all_by_count:
                scale = _LOG2E / tl.maximum(heat, _MIN_TEMPERATURE)
                base = tl.where(best > float("-inf"), best, 0.0)
                words = words_of_quads(
                    quads,
                    tl.load(seed + slot),
                    tl.load(sequence_index + slot),
                    tl.load(position + slot),
                    CHUNK // 4,
                )
                time = exponential(words) * tl.exp2((base - found) * scale)
                first = tl.min(time)
                winner = tl.min(tl.where(time == first, token_ids, vocab_size))
                tl.store(chunk_winner + entry, winner)
                tl.store(chunk_mass + entry, tl.sum(tl.exp2((found - base) * scale)))


@triton.jit
def sampling_rows(
    logits: tl.tensor,
    row_stride: tl.tensor,
    logit_rows: tl.tensor,
    slots: tl.tensor,
    columns: tl.tuple,
    adjustments: tl.tuple,
    chunk_best: tl.tensor,
    chunk_best_id: tl.tensor,
    chunk_winner: tl.tensor,
    chunk_mass: tl.tensor,
    group_best: tl.tensor,
    listed_groups: tl.tensor,
    out: tl.tensor,
    last_token: tl.tensor,
    last_position: tl.tensor,
    holds: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Programs: rows. CHUNKS and GROUPS are the numbers of them, up to a power of two."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        temperature, _, _, _, _, _, position = columns
        source = _source(logits, row_stride, logit_rows, row)
        adjustment = None
        if adjustments is not None:
            adjustment = open_adjustment(adjustments, slot, tl.load(position + slot), vocab_size)
        chunk = tl.arange(0, CHUNKS)
        entry = row * num_chunks + chunk
        in_chunk = chunk < num_chunks
        bests = tl.load(chunk_best + entry, mask=in_chunk, other=float("-inf"))
        best_ids = tl.load(chunk_best_id + entry, mask=in_chunk, other=0)
        best = tl.max(bests)
        token = tl.min(tl.where(bests == best, best_ids, vocab_size))
        if best == float("inf"):
            token = _NOT_A_NUMBER
        elif best == float("-inf"):
            token = _NOTHING_ALLOWED
        elif tl.load(temperature + slot) > 0:
            parts = (
                bests,
                tl.load(chunk_winner + entry, mask=in_chunk, other=0),
                tl.load(chunk_mass + entry, mask=in_chunk, other=0.0),
            )
            token = _sampled(
                source,
                adjustment,
                columns,
                slot,
                (best, token),
                parts,
                group_best + row * num_groups,
                listed_groups + row * num_groups,
                vocab_size,
                num_groups,
                GROUPS,
                GROUP,
                TILE,
                STAGES,
            )
        tl.store(out + row, token)
        if last_token is not None:
            held = 0
            if holds is not None:
                held = tl.load(holds + row)
            if held == 0:
                tl.store(last_token + slot, tl.maximum(token, 0))
                tl.store(last_position + slot, tl.load(last_position + slot) + 1)
                tl.store(position + slot, tl.load(position + slot) + 1)
                if adjustments is not None:
                    count_token(adjustment, token)


@triton.jit
def _sampled(
    source: tl.tensor,
    adjustment: tl.tuple,
    columns: tl.tuple,
    slot: tl.tensor,
    first: tl.tuple,
    parts: tl.tuple,
    group_best: tl.tensor,
    listed: tl.tensor,
    vocab_size: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """The token of a row whose logits are healthy and whose temperature is not 0.

    Args:
        first: the best logit and its token, the first in the order of all.
        parts: of each chunk the best logit, the best perturbed token and the mass; the last two
            mean nothing where top_k is set.
        group_best, listed: pointers to the row's.
    """
    temperature, min_p, top_k, top_p, seed, sequence_index, position = columns
    heat = tl.maximum(tl.load(temperature + slot), _MIN_TEMPERATURE)
    share = tl.load(min_p + slot)
    count_limit = tl.load(top_k + slot)
    mass_limit = tl.load(top_p + slot).to(tl.float64)
    seed = tl.load(seed + slot)
    sequence_index = tl.load(sequence_index + slot)
    position = tl.load(position + slot)
    key = (seed, sequence_index, position)
    best, best_id = first
    scores = (best, _LOG2E / heat)
    by_count = count_limit < vocab_size
    by_mass = mass_limit < 1.0

    chunk_bests, winners, masses = parts
    usable = chunk_bests > float("-inf")
    found = load_logits(source, winners, usable & (by_count == 0), adjustment)
    words = words_of_tokens(winners, seed, sequence_index, position)
    time = exponential(words) * tl.exp2((best - found) * scores[1])
    token = tl.min(tl.where(time == tl.min(time), winners, vocab_size))

    if by_count | by_mass | (share > 0):
        row = (source, adjustment, listed, vocab_size)
        group = tl.arange(0, GROUPS)
        group_bests = tl.load(group_best + group, mask=group < num_groups, other=float("-inf"))
        # Logits below it are removed by min_p or, surely, by top_k.
        lowest = float("-inf")
        if share > 0:
            lowest = best + heat * tl.log(share)
        if by_count:
            lowest = tl.maximum(lowest, reached_by(group_bests, best, count_limit))
        num_listed = 0
        total = 1.0
        if by_count | (share > 0):
            num_listed = list_groups(group_bests, lowest, listed, GROUPS)
            if by_mass:
                total = mass_within(
                    row, num_listed, lowest, count_limit, scores, GROUP, TILE, STAGES
                )
        else:
            total = tl.sum(masses * tl.exp2((chunk_bests - best) * scores[1]))
        token_logit = best
        tried = by_count == 0
        if tried:
            token_logit = load_logits(source, token, token >= 0, adjustment)
            tried = token_logit >= lowest
        bound = float("-inf")
        bound_id = vocab_size
        done = tl.full((), 0, tl.int1)
        while done == 0:
            if tried == 0:
                token, token_logit = race(
                    row, num_listed, lowest, bound, bound_id, scores, key, GROUP, TILE, STAGES
                )
            # The first token survives every filter, and min_p has been seen to.
            done = (token == best_id) | ((by_count | by_mass) == 0)
            if done == 0:
                num_listed = list_groups(group_bests, token_logit, listed, GROUPS)
                count, mass = preceding(
                    row, num_listed, token_logit, token, scores, GROUP, TILE, STAGES
                )
                within = mass.to(tl.float64) < mass_limit * total
                done = (count < count_limit) & (within | (by_mass == 0))
                tried = done
                bound = token_logit
                bound_id = token
    return token
