"""Sampling spelled out in plain Python, one token at a time: what the backends must equal."""

from __future__ import annotations

import math

import numpy as np

_MASK = 0xFFFFFFFF


def philox_words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, sequence_index: int, position: int, token_id: int) -> float:
    counter = (token_id >> 2, position, sequence_index, 0)
    word = philox_words(counter, (seed & _MASK, (seed >> 32) & _MASK))[token_id & 3]
    return -math.log(-math.log(((word >> 8) + 0.5) * 2.0**-24))


def candidates(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> list[tuple[int, float]]:
    """(token id, score) of what the filters leave, likeliest first."""
    best = np.float32(max(logits))
    divisor = max(np.float32(temperature), np.float32(1e-30))
    with np.errstate(over="ignore"):
        scores = [float((np.float32(x) - best) / divisor) for x in logits]
    floor = float(np.log(np.float32(min_p))) if min_p > 0 else -math.inf
    ranked = sorted(
        ((i, s) for i, s in enumerate(scores) if s >= floor and s > -math.inf),
        key=lambda item: (-item[1], item[0]),
    )[:top_k]
    if top_p >= 1.0:
        return ranked
    total = math.fsum(math.exp(score) for _, score in ranked)
    kept: list[tuple[int, float]] = []
    before = 0.0
    for token_id, score in ranked:
        if kept and before >= top_p * total:
            break
        kept.append((token_id, score))
        before += math.exp(score)
    return kept


def choose(
    logits: list[float],
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    sequence_index: int,
    position: int,
) -> int:
    if temperature == 0.0:
        return logits.index(max(logits))
    perturbed = [
        (-(score + gumbel(seed, sequence_index, position, token_id)), token_id)
        for token_id, score in candidates(logits, temperature, min_p, top_k, top_p)
    ]
    return min(perturbed)[1]
