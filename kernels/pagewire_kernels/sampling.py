"""Choosing tokens from logits: filters and counter-based Gumbel noise.

Plain torch, any device. Every row is treated by itself: what a row gives never depends on the rows
beside it, on how many there are, or on what was sampled before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels.attention import BackendUnavailableError
from pagewire_kernels.philox import gumbel_noise, philox4x32
from pagewire_kernels.token_masks import TokenMasks, masked_logits
from pagewire_kernels.token_order import NEGATIVE_INFINITY, largest

logger = logging.getLogger(__name__)

# What stands for a token where there is none.
NOT_A_NUMBER, NOTHING_ALLOWED = -1, -2

# Widths that are tried, in turn, to find a row's candidates before all of it is sorted.
_CANDIDATE_WIDTHS = (64, 1024)
# Scores that full-vocabulary noise is drawn for in one go: bounds its temporaries (about 100 bytes
# for each).
_CHUNK_ELEMENTS = 1 << 20
# Below any temperature that means something, and far from float32's underflow.
MIN_TEMPERATURE = 1e-30
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomKeys:
    """What a row's noise is a function of, besides the token id. All int64 [R]."""

    seeds: Tensor
    sequence_indexes: Tensor
    positions: Tensor

    def select(self, rows: Tensor) -> RandomKeys:
        """The keys of some rows, given as int64 indexes."""
        return RandomKeys(self.seeds[rows], self.sequence_indexes[rows], self.positions[rows])


@dataclass(frozen=True)
class RowParameters:
    """How each of R rows is sampled; lists of R entries.

    Attributes:
        temperatures: 0 is greedy.
        min_ps: 0 keeps all.
        top_ks: at least 1; vocabulary size or above keeps all.
        top_ps: 1 keeps all.
        seeds, sequence_indexes, positions: what the noise is a function of; see philox.py.
    """

    temperatures: list[float]
    min_ps: list[float]
    top_ks: list[int]
    top_ps: list[float]
    seeds: list[int]
    sequence_indexes: list[int]
    positions: list[int]


class TokenChooser(Protocol):
    """Chooses tokens; backends give the same ones."""

    def choose(
        self, logits: Tensor, parameters: RowParameters, masks: TokenMasks | None = None
    ) -> Tensor:
        """One token a row: its mask, temperature, min_p, top_k, top_p, then Gumbel-max.

        Args:
            logits: [R, V] float32; left as they are.
            parameters: of the R rows.
            masks: of the R rows. None: all tokens are allowed.

        Returns:
            int64 [R] token ids. Equal scores are decided by the lower id. NOT_A_NUMBER where a
            row holds NaN or +inf, else NOTHING_ALLOWED where all that its mask leaves is -inf.
        """
        ...


def load_token_chooser(device: torch.device | str) -> TokenChooser:
    """The fastest chooser for a device.

    On CPU the C++ one where it is built, on CUDA Triton's where that is installed, else torch's.
    """
    device = torch.device(device)
    if device.type == "cuda":
        try:
            from pagewire_kernels.gpu.sampling import TritonChooser  # it builds on this module
        except ImportError as error:
            logger.warning("sampling runs on the torch backend: %s; install triton", error)
        else:
            return TritonChooser(device)
    if device.type == "cpu":
        from pagewire_kernels import cpu  # it builds on this module

        try:
            return cpu.load_chooser()
        except BackendUnavailableError as error:
            logger.debug("sampling runs on the torch backend: %s", error)
    return TorchChooser()


class TorchChooser:
    """The reference: any device."""

    def choose(
        self, logits: Tensor, parameters: RowParameters, masks: TokenMasks | None = None
    ) -> Tensor:
        return choose_where_possible(self._choose, logits, parameters, masks)

    def _choose(self, logits: Tensor, parameters: RowParameters) -> Tensor:
        vocab_size = logits.shape[-1]
        greedy: list[int] = []
        unfiltered: list[int] = []
        filtered: list[int] = []
        for row, temperature in enumerate(parameters.temperatures):
            if temperature == 0.0:
                greedy.append(row)
            elif parameters.top_ks[row] < vocab_size or parameters.top_ps[row] < 1.0:
                filtered.append(row)
            else:
                unfiltered.append(row)
        if len(greedy) == logits.shape[0]:
            return logits.argmax(dim=-1)
        chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        if greedy:
            where = torch.tensor(greedy, device=logits.device)
            chosen[where] = logits[where].argmax(dim=-1)
        if unfiltered:
            where = torch.tensor(unfiltered, device=logits.device)
            chosen[where] = sample_all(*_scores_and_keys(logits, parameters, unfiltered))
        if filtered:
            where = torch.tensor(filtered, device=logits.device)
            top_ks = torch.tensor([parameters.top_ks[row] for row in filtered])
            top_ps = torch.tensor([parameters.top_ps[row] for row in filtered], dtype=torch.float64)
            chosen[where] = sample_filtered(
                *_scores_and_keys(logits, parameters, filtered),
                top_ks.to(logits.device),
                top_ps.to(logits.device),
            )
        return chosen


def choose_where_possible(
    choose: Callable[[Tensor, RowParameters], Tensor],
    logits: Tensor,
    parameters: RowParameters,
    masks: TokenMasks | None,
) -> Tensor:
    """What TokenChooser.choose returns, by a choice that knows of no masks and needs a finite
    number in each row, and neither NaN nor +inf."""
    # The largest value shows every fault: NaN spreads, +inf is above all.
    are_numbers = logits.amax(dim=-1) < math.inf
    logits = masked_logits(logits, masks)
    are_good = are_numbers & (logits.amax(dim=-1) > NEGATIVE_INFINITY)
    chosen = choose(torch.where(are_good[:, None], logits, 0.0), parameters)
    faults = torch.where(are_numbers, NOTHING_ALLOWED, NOT_A_NUMBER)
    return torch.where(are_good, chosen, faults)


def _scores_and_keys(
    logits: Tensor, parameters: RowParameters, rows: list[int]
) -> tuple[Tensor, RandomKeys]:
    def gather(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[row] for row in rows], dtype=dtype, device=logits.device)

    scores = scale_by_temperature(
        logits[torch.tensor(rows, device=logits.device)],
        gather(parameters.temperatures, torch.float32),
        gather(parameters.min_ps, torch.float32),
    )
    keys = RandomKeys(
        gather(parameters.seeds, torch.int64),
        gather(parameters.sequence_indexes, torch.int64),
        gather(parameters.positions, torch.int64),
    )
    return scores, keys


def scale_by_temperature(logits: Tensor, temperatures: Tensor, min_ps: Tensor) -> Tensor:
    """Scores relative to the row's best, with tokens below min_p removed.

    Args:
        logits: [R, V] float32, no NaN and no +inf, at least one finite number a row.
        temperatures: [R] float32, above 0.
        min_ps: [R] float32; tokens less likely than this share of the likeliest go. 0: none.

    Returns:
        [R, V] float32, 0 for the best token and below for others, -inf for removed ones. The
        best is subtracted first, so that no temperature, however small, overflows.
    """
    scores = logits - logits.amax(dim=-1, keepdim=True)
    scores /= temperatures.clamp(min=MIN_TEMPERATURE)[:, None]
    # p / p_best is exp of the score, so that no softmax is needed.
    floors = torch.log(min_ps)
    return scores.masked_fill_(scores < floors[:, None], NEGATIVE_INFINITY)


def sample_all(scores: Tensor, keys: RandomKeys) -> Tensor:
    """Gumbel-max over all tokens of each row.

    Args:
        scores: [R, V] float32 from `scale_by_temperature`.
        keys: of the R rows.

    Returns:
        int64 [R] token ids.
    """
    rows_at_once = max(1, _CHUNK_ELEMENTS // scores.shape[-1])
    chosen = []
    for start in range(0, scores.shape[0], rows_at_once):
        part = slice(start, start + rows_at_once)
        noise = _noise_of_all(
            scores.shape[-1], keys.seeds[part], keys.sequence_indexes[part], keys.positions[part]
        )
        chosen.append(noise.add_(scores[part]).argmax(dim=-1))
    return torch.cat(chosen)


def sample_filtered(scores: Tensor, keys: RandomKeys, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Gumbel-max over each row's candidates after top_k, then top_p.

    top_p keeps the smallest number of likeliest tokens whose probabilities, renormalised after
    min_p and top_k, add up to it. Noise is drawn for the candidates only.

    Args:
        scores: [R, V] float32 from `scale_by_temperature`.
        keys: of the R rows.
        top_ks: int64 [R]; V or more keeps all.
        top_ps: float64 [R]; 1 keeps all.

    Returns:
        int64 [R] token ids.
    """
    vocab_size = scores.shape[-1]
    chosen = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    totals = _probability_totals(scores, top_ks)
    pending = torch.arange(scores.shape[0], device=scores.device)
    for width in (*_CANDIDATE_WIDTHS, vocab_size):
        width = min(width, vocab_size)
        values, ids = largest(scores[pending], width, unordered=NEGATIVE_INFINITY)
        kept, exact = _cut(values, top_ks[pending], top_ps[pending], totals[pending], vocab_size)
        done = exact.nonzero().flatten()
        if done.numel():
            rows = pending[done]
            if width < vocab_size:
                chosen[rows] = _choose(values[done], ids[done], kept[done], keys.select(rows))
            else:
                survivors = values.masked_fill_(~kept, NEGATIVE_INFINITY)
                chosen[rows] = sample_all(
                    torch.empty_like(survivors).scatter_(-1, ids, survivors), keys.select(rows)
                )
        pending = pending[(~exact).nonzero().flatten()]
        if not pending.numel():
            break
    return chosen


def _noise_of_all(
    vocab_size: int, seeds: Tensor, sequence_indexes: Tensor, positions: Tensor
) -> Tensor:
    """Noise float64 [R, vocab_size]; each evaluation of the generator serves four tokens."""
    groups = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    words = philox4x32(
        (
            groups,
            (positions & _MASK32)[:, None],
            sequence_indexes[:, None],
            torch.zeros_like(groups),
        ),
        ((seeds & _MASK32)[:, None], ((seeds >> 32) & _MASK32)[:, None]),
    )
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform = ((uniform >> 8).double() + 0.5) * 2.0**-24
    return uniform.log_().neg_().log_().neg_()


def _probability_totals(scores: Tensor, top_ks: Tensor) -> Tensor:
    """float64 [R]: what exp(score) of the row adds up to; 0 where top_k makes it needless."""
    totals = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    whole = (top_ks >= scores.shape[-1]).nonzero().flatten()
    if whole.numel():
        totals[whole] = scores[whole].exp_().sum(dim=-1, dtype=torch.float64)
    return totals


def _cut(
    values: Tensor, top_ks: Tensor, top_ps: Tensor, totals: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Which of a row's W likeliest tokens stay, and whether W were enough to know.

    Returns:
        bool [R, W], and bool [R].
    """
    width = values.shape[-1]
    columns = torch.arange(width, device=values.device)[None, :]
    within_k = columns < top_ks[:, None]
    mass = values.double().exp() * within_k
    cumulative = mass.cumsum(dim=-1)
    totals = torch.where(top_ks < vocab_size, cumulative[:, -1], totals)
    # A token stays while those before it have not reached top_p.
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    reached = before >= (top_ps * totals)[:, None]
    # Rounding must not drop a tail when everything is wanted, nor ever the best token.
    reached &= (top_ps < 1.0)[:, None] & (columns > 0)
    kept = within_k & ~reached & (values > NEGATIVE_INFINITY)
    exact = (top_ks <= width) | reached[:, -1] | (values[:, -1] == NEGATIVE_INFINITY)
    if width >= vocab_size:
        exact = torch.ones_like(exact)
    return kept, exact & ((top_ks >= vocab_size) | (top_ks <= width))


def _choose(values: Tensor, ids: Tensor, kept: Tensor, keys: RandomKeys) -> Tensor:
    noise = gumbel_noise(
        keys.seeds[:, None], keys.sequence_indexes[:, None], keys.positions[:, None], ids
    )
    perturbed = (noise + values).masked_fill_(~kept, NEGATIVE_INFINITY)
    # Equal sums are decided by the lower id, as an argmax over the whole vocabulary would.
    best = perturbed.amax(dim=-1, keepdim=True)
    return torch.where(perturbed == best, ids, torch.iinfo(torch.int64).max).amin(dim=-1)
