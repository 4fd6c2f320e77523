"""Sampling's Triton kernels on the device, at the size of real vocabularies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels.gpu import sampling_penalties
from pagewire_kernels.gpu.sampling import (
    PADDING,
    Epilogue,
    SamplingColumns,
    SamplingWorkspace,
    TritonChooser,
    sample,
)
from pagewire_kernels.gpu.sampling_logprobs import raw_logprobs
from pagewire_kernels.logprobs import raw_logprobs as reference_logprobs
from pagewire_kernels.philox import gumbel_noise
from pagewire_kernels.sampling import (
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    RowParameters,
    TorchChooser,
    load_token_chooser,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZES = [128_256, 151_936]
# temperature, min_p, top_k (0: all), top_p
KINDS = [
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.8, 0.0, 0, 0.95),
    (1.0, 0.0, 50, 1.0),
    (0.7, 0.0, 50, 0.9),
    (1.0, 0.05, 0, 1.0),
    (1.0, 0.02, 0, 0.9),
    (1.3, 0.0, 3000, 0.5),
    (1e-5, 0.0, 0, 0.9),
    (1.0, 0.01, 20, 0.99),
    (1.0, 0.0, 1, 1.0),
    (2.0, 0.0, 0, 0.01),
]


def make_logits(rows: int, vocab_size: int, spread: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    logits = torch.randn(rows, vocab_size, device="cuda", generator=generator) * spread
    return logits.to(dtype)


def make_parameters(rows: int, vocab_size: int) -> RowParameters:
    kinds = [KINDS[row % len(KINDS)] for row in range(rows)]
    return RowParameters(
        temperatures=[kind[0] for kind in kinds],
        min_ps=[kind[1] for kind in kinds],
        top_ks=[kind[2] or vocab_size for kind in kinds],
        top_ps=[kind[3] for kind in kinds],
        seeds=[(row * 0x9E3779B97F4A7C15) % 2**63 for row in range(rows)],
        sequence_indexes=[row % 5 for row in range(rows)],
        positions=[row * 3 for row in range(rows)],
    )


def make_columns(parameters: RowParameters) -> SamplingColumns:
    def column(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    return SamplingColumns(
        temperature=column(parameters.temperatures, torch.float32),
        min_p=column(parameters.min_ps, torch.float32),
        top_k=column(parameters.top_ks, torch.int32),
        top_p=column(parameters.top_ps, torch.float32),
        seed=column(parameters.seeds, torch.int64),
        sequence_index=column(parameters.sequence_indexes, torch.int32),
        position=column(parameters.positions, torch.int32),
    )


def is_near_tie(logits: Tensor, parameters: RowParameters, row: int, one: int, other: int) -> bool:
    """Whether rounding alone decides between two tokens: by their noise, or at a filter's edge."""
    heat = parameters.temperatures[row]
    scores = (logits[row].double() - logits[row].double().max()) / heat
    ids = torch.tensor([one, other], device="cuda")
    key = [
        torch.tensor([column[row]], device="cuda")
        for column in (parameters.seeds, parameters.sequence_indexes, parameters.positions)
    ]
    first, second = (gumbel_noise(*key, ids) + scores[ids]).tolist()
    if abs(first - second) < 1e-4:
        return True
    for token_id in (one, other):
        score = scores[token_id]
        min_p, top_p = parameters.min_ps[row], parameters.top_ps[row]
        if min_p and abs(score.item() - math.log(min_p)) < 1e-4:
            return True
        kept = scores.sort(descending=True).values[: parameters.top_ks[row]]
        if min_p:
            kept = kept[kept >= math.log(min_p)]
        total = kept.exp().sum()
        # Between what comes before by value alone, and with all that are equal.
        before = kept[kept > score + 1e-6].exp().sum() / total
        equal = kept[kept >= score - 1e-6].exp().sum() / total
        if top_p < 1.0 and before - 1e-5 < top_p < equal + 1e-5:
            return True
    return False


@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_equal_the_references_up_to_near_ties(vocab_size: int, spread: float) -> None:
    rows = 256
    logits = make_logits(rows, vocab_size, spread, torch.bfloat16).float()
    parameters = make_parameters(rows, vocab_size)
    found = TritonChooser("cuda").choose(logits, parameters).tolist()
    expected = TorchChooser().choose(logits, parameters).tolist()
    others = [row for row in range(rows) if found[row] != expected[row]]
    assert len(others) <= 1
    assert all(is_near_tie(logits, parameters, r, found[r], expected[r]) for r in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 50_257])
def test_a_row_gives_the_same_token_in_every_batch(vocab_size: int, dtype: torch.dtype) -> None:
    rows = 256
    logits = make_logits(rows, vocab_size, 1.0, dtype)
    columns = make_columns(make_parameters(rows, vocab_size))
    workspace = SamplingWorkspace(rows, vocab_size, "cuda")

    def tokens(slots: list[int]) -> list[int]:
        out = torch.empty(len(slots), dtype=torch.int32, device="cuda")
        chosen = torch.tensor(slots, dtype=torch.int32, device="cuda")
        sample(logits[chosen.long()], chosen, columns, out, workspace)
        return out.tolist()

    together = tokens(list(range(rows)))
    for size in (1, 3, 8, 64):
        for start in range(0, rows - size, max(size, 37)):
            slots = list(range(start, start + size))
            assert tokens(slots) == together[start : start + size]
    assert tokens(list(reversed(range(rows)))) == together[::-1]


def test_a_captured_graph_follows_the_columns_and_the_epilogue() -> None:
    rows, vocab_size = 16, 128_256
    logits = make_logits(rows, vocab_size, 1.0, torch.bfloat16)
    columns = make_columns(make_parameters(rows, vocab_size))
    workspace = SamplingWorkspace(rows, vocab_size, "cuda")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(slots)
    epilogue = Epilogue(torch.zeros_like(slots), torch.zeros_like(slots))

    def call() -> None:
        sample(logits, slots, columns, out, workspace, epilogue=epilogue)

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(4):
        changed = replace(make_parameters(rows, vocab_size), seeds=[seed] * rows)
        changed = replace(changed, top_ps=[0.5 + 0.1 * seed] * rows)
        for name, column in vars(make_columns(changed)).items():
            getattr(columns, name).copy_(column)
        slots.copy_(torch.arange(rows, dtype=torch.int32))
        slots[seed] = PADDING
        out.fill_(PADDING)
        graph.replay()
        expected = TorchChooser().choose(logits.float(), changed).tolist()
        expected[seed] = PADDING
        assert out.tolist() == expected
        assert epilogue.last_token[out >= 0].tolist() == [t for t in expected if t >= 0]
        advanced = [position + 1 for position in changed.positions]
        advanced[seed] -= 1
        assert columns.position.tolist() == advanced


def test_faulty_rows_fail_alone() -> None:
    rows, vocab_size = 4, 128_256
    logits = make_logits(rows, vocab_size, 1.0, torch.bfloat16)
    columns = make_columns(make_parameters(rows, vocab_size))
    workspace = SamplingWorkspace(rows, vocab_size, "cuda")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    good, out = torch.empty_like(slots), torch.empty_like(slots)
    sample(logits, slots, columns, good, workspace)
    logits[0, 128_255] = torch.nan
    logits[2, 77] = torch.inf
    logits[3] = -torch.inf
    sample(logits, slots, columns, out, workspace)
    assert out.tolist() == [NOT_A_NUMBER, good[1].item(), NOT_A_NUMBER, NOTHING_ALLOWED]


def test_penalties_on_device_counts_equal_adjusted_logits() -> None:
    """Adjusted on the host by the definition, then chosen by the reference."""
    rows, vocab_size = 12, 128_256
    logits = make_logits(rows, vocab_size, 1.0, torch.bfloat16)
    parameters = make_parameters(rows, vocab_size)
    state = sampling_penalties.PenaltyState(
        vocab_size, rows, "cuda", num_histories=rows, num_biases=rows
    )
    adjusted = logits.float().cpu()
    best = adjusted.argmax(-1).tolist()
    for row in range(0, rows, 2):
        output = [best[row], best[row], 5]
        state.acquire(
            row,
            sampling_penalties.Penalties(
                prompt_token_ids=[7, best[row]],
                output_token_ids=output,
                repetition=1.5,
                frequency=0.25,
                presence=0.5,
                min_tokens=10**6,
                suspended_token_ids=[9],
                bias={11: 4.0},
            ),
        )
        for token_id in {*output, 7}:
            value, count = adjusted[row, token_id], output.count(token_id)
            value = value / 1.5 if value > 0 else value * 1.5
            adjusted[row, token_id] = value - (0.25 * count + 0.5 * (count > 0))
        adjusted[row, 11] += 4.0
        adjusted[row, 9] = -torch.inf
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(slots)
    workspace = SamplingWorkspace(rows, vocab_size, "cuda")
    columns = make_columns(parameters)
    epilogue = Epilogue(torch.zeros_like(slots), torch.zeros_like(slots))
    before = state.adjustments.histories.clone()
    sample(logits, slots, columns, out, workspace, adjustments=state.adjustments, epilogue=epilogue)
    expected = TorchChooser().choose(adjusted.cuda(), parameters)
    assert out.tolist() == expected.tolist()
    counted = state.adjustments.histories - before
    for row in range(rows):
        history = int(state.adjustments.history[row])
        if history >= 0:
            assert counted[history].nonzero().flatten().tolist() == [out[row].item()]


@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 50_257])
def test_logprobs_equal_the_references_and_are_the_same_bits_alone(vocab_size: int) -> None:
    logits = make_logits(16, vocab_size, 2.0, torch.bfloat16)
    ids = torch.randint(vocab_size, (16,), device="cuda", dtype=torch.int32)
    ids[:4] = logits[:4].argmax(-1)
    found = raw_logprobs(logits, ids, 20)
    expected = reference_logprobs(logits.float(), ids.long(), 20)
    for index, tolerance in ((0, 1e-4), (2, 1e-4)):
        torch.testing.assert_close(found[index], expected[index], rtol=0, atol=tolerance)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[3], expected[3])
    for row in range(16):
        alone = raw_logprobs(logits[row : row + 1].clone(), ids[row : row + 1], 20)
        for one, all_of_them in zip(alone, found, strict=True):
            assert torch.equal(one[0], all_of_them[row])


def test_nothing_waits_for_the_device() -> None:
    """Sampling, penalties and log probabilities queue their work and return."""
    rows, vocab_size = 4, 50_257
    logits = make_logits(rows, vocab_size, 1.0, torch.bfloat16)
    columns = make_columns(make_parameters(rows, vocab_size))
    workspace = SamplingWorkspace(rows, vocab_size, "cuda")
    state = sampling_penalties.PenaltyState(
        vocab_size, rows, "cuda", num_histories=rows, num_biases=rows
    )
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.acquire(0, sampling_penalties.Penalties([1], [2], presence=0.5, bias={3: 1.0}))
        sample(logits, slots, columns, out, workspace, adjustments=state.adjustments)
        raw_logprobs(logits, out, 20)
        raw_logprobs(logits, out, 5, slots)
        state.release(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_is_sampled_by_triton() -> None:
    assert isinstance(load_token_chooser("cuda"), TritonChooser)
