"""What a filtered row asks of its groups of neighbouring tokens, in the second kernel of sampling.

A group's best logit is known; those whose best reaches a bound are listed, and only their tokens
are looked at. A row is (pointer to its logits, what is added to them, pointer to its list, size of
the vocabulary); its scores are (best logit, what differences to it are multiplied by).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pagewire_kernels.gpu.sampling_noise import exponential, words_of_quads
from pagewire_kernels.gpu.sampling_penalties import load_logits

# Halvings of the search among groups; what it has not found by then costs time, nothing else.
_HALVINGS = tl.constexpr(24)


@triton.jit
def reached_by(group_bests: tl.tensor, best: tl.tensor, count: tl.tensor) -> Any:
    """A logit that `count` groups reach and few more; -inf if there are not so many."""
    usable = group_bests > float("-inf")
    low = tl.min(tl.where(usable, group_bests, best))
    low = tl.where(tl.sum(usable.to(tl.int32)) >= count, low, float("-inf"))
    high = best
    halvings = 0
    while (halvings < _HALVINGS) & (low > float("-inf")):
        middle = low * 0.5 + high * 0.5
        reached = tl.sum((group_bests >= middle).to(tl.int32))
        enough = reached >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        close = enough & (reached <= count + count // 8)
        halvings = tl.where(close, _HALVINGS, halvings + 1)
    return low


@triton.jit
def list_groups(
    group_bests: tl.tensor, lowest: tl.tensor, listed: tl.tensor, GROUPS: tl.constexpr
) -> Any:
    """Lists the groups whose best reaches `lowest`, in rising order; returns their number."""
    reaches = (group_bests >= lowest) & (group_bests > float("-inf"))
    chosen = reaches.to(tl.int32)
    # All have read the list that was there, and all will read the one written here.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(chosen, axis=0) - 1, tl.arange(0, GROUPS), mask=reaches)
    tl.debug_barrier()
    return tl.sum(chosen)


@triton.jit
def _load_tile(
    row: tl.tuple,
    num_listed: tl.tensor,
    start: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """Quads [TILE / 4], token ids and logits [TILE / 4, 4] of listed groups from `start` on."""
    source, adjustment, listed, vocab_size = row
    lane = tl.arange(0, TILE // 4)
    place = start + lane // (GROUP // 4)
    group = tl.load(listed + place, mask=place < num_listed, other=0)
    quads = group * (GROUP // 4) + lane % (GROUP // 4)
    token_ids = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = (place < num_listed)[:, None] & (token_ids < vocab_size)
    return quads, token_ids, load_logits(source, token_ids, inside, adjustment)


@triton.jit
def race(
    row: tl.tuple,
    num_listed: tl.tensor,
    lowest: tl.tensor,
    bound: tl.tensor,
    bound_id: tl.tensor,
    scores: tl.tuple,
    key: tl.tuple,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """The best perturbed token that reaches `lowest` and comes before (bound, bound_id)."""
    source, adjustment, _, vocab_size = row
    best, scale = scores
    seed, sequence_index, position = key
    times = tl.full((TILE // 4, 4), float("inf"), tl.float32)
    ids = tl.zeros((TILE // 4, 4), tl.int32) + vocab_size
    for start in tl.range(0, num_listed, TILE // GROUP, num_stages=STAGES):
        quads, token_ids, found = _load_tile(row, num_listed, start, GROUP, TILE)
        before = (found > bound) | ((found == bound) & (token_ids < bound_id))
        words = words_of_quads(quads, seed, sequence_index, position, TILE // 4)
        time = exponential(words) * tl.exp2((best - found) * scale)
        # A lane's ids rise, so that the earlier one stays where times are equal.
        wins = before & (found >= lowest) & (time < times)
        times = tl.where(wins, time, times)
        ids = tl.where(wins, token_ids, ids)
    token = tl.min(tl.where(times == tl.min(times), ids, vocab_size))
    return token, load_logits(source, token, token >= 0, adjustment)


@triton.jit
def preceding(
    row: tl.tuple,
    num_listed: tl.tensor,
    bound: tl.tensor,
    bound_id: tl.tensor,
    scores: tl.tuple,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """How many tokens come before (bound, bound_id), and their mass."""
    best, scale = scores
    count = tl.zeros((TILE // 4,), tl.int32)
    mass = tl.zeros((TILE // 4,), tl.float32)
    for start in tl.range(0, num_listed, TILE // GROUP, num_stages=STAGES):
        _, token_ids, found = _load_tile(row, num_listed, start, GROUP, TILE)
        before = (found > bound) | ((found == bound) & (token_ids < bound_id))
        count += tl.sum(before.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(before, tl.exp2((found - best) * scale), 0.0), axis=1)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def mass_within(
    row: tl.tuple,
    num_listed: tl.tensor,
    lowest: tl.tensor,
    count_limit: tl.tensor,
    scores: tl.tuple,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """The mass of the first count_limit tokens, of those that reach `lowest`.

    The logit of the last of them lies between two that exist. Each look at what reaches a value in
    the middle moves one of the two inwards, to a logit that exists.
    """
    best, scale = scores
    low = lowest
    high = best
    middle = lowest
    # Of the tokens above `high`.
    count_above = 0
    mass_above = 0.0
    total = 0.0
    searching = tl.full((), 1, tl.int1)
    while searching:
        count, mass, smallest, below = _reaching(
            row, num_listed, middle, scores, GROUP, TILE, STAGES
        )
        if (count == count_limit) | ((count < count_limit) & (middle == lowest)):
            total = mass
            searching = tl.full((), 0, tl.int1)
        else:
            enough = count > count_limit
            low = tl.where(enough, smallest, low)
            high = tl.where(enough, high, below)
            count_above = tl.where(enough, count_above, count)
            mass_above = tl.where(enough, mass_above, mass)
            searching = low < high
            equal = (count_limit - count_above).to(tl.float32) * tl.exp2((low - best) * scale)
            total = mass_above + equal
            middle = low * 0.5 + high * 0.5
            middle = tl.where(middle > low, middle, high)
    return total


@triton.jit
def _reaching(
    row: tl.tuple,
    num_listed: tl.tensor,
    lowest: tl.tensor,
    scores: tl.tuple,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> Any:
    """Of the tokens that reach `lowest`: number, mass, smallest logit; and the largest below."""
    best, scale = scores
    count = tl.zeros((TILE // 4,), tl.int32)
    mass = tl.zeros((TILE // 4,), tl.float32)
    smallest = tl.full((TILE // 4,), float("inf"), tl.float32)
    below = tl.full((TILE // 4,), float("-inf"), tl.float32)
    for start in tl.range(0, num_listed, TILE // GROUP, num_stages=STAGES):
        _, _, found = _load_tile(row, num_listed, start, GROUP, TILE)
        reaches = (found >= lowest) & (found > float("-inf"))
        count += tl.sum(reaches.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(reaches, tl.exp2((found - best) * scale), 0.0), axis=1)
        smallest = tl.minimum(smallest, tl.min(tl.where(reaches, found, float("inf")), axis=1))
        below = tl.maximum(below, tl.max(tl.where(reaches, float("-inf"), found), axis=1))
    return tl.sum(count), tl.sum(mass), tl.min(smallest), tl.max(below)
