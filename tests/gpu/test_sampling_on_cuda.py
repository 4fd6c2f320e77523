"""Sampling on a CUDA device: the same tokens as on CPU, and rows that ignore their neighbours."""

from __future__ import annotations

import pytest
import torch

from pagewire.beam_search_params import BeamSearchParams
from pagewire.sampling_params import SamplingParams
from pagewire_engine.worker.beam_candidates import beam_candidates
from pagewire_engine.worker.sampler import Sampler, SamplingRow
from pagewire_kernels.logprobs import raw_logprobs
from pagewire_kernels.philox import token_words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERY_KIND = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=50, logprobs=5),
    SamplingParams(top_p=0.9, temperature=0.7),
    SamplingParams(top_k=2000, top_p=0.95),
    SamplingParams(min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=1e-5, top_p=0.5),
    SamplingParams(min_tokens=9, stop_token_ids=(5, 6), logit_bias={7: 3.0}),
]


def make_rows(count: int, first: int = 0) -> list[SamplingRow]:
    return [
        SamplingRow(
            i, i - first, i % 3, 50 + i, EVERY_KIND[i % len(EVERY_KIND)], [1, 2, 3], [4, 5, 4]
        )
        for i in range(first, first + count)
    ]


@pytest.mark.parametrize("vocab_size", [49_152, 50_257, 128_256])
def test_tokens_equal_those_of_the_cpu_and_those_alone(vocab_size: int) -> None:
    logits = torch.randn(32, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    on_cpu, _ = Sampler(vocab_size, [2], "cpu").sample(logits, make_rows(32))
    sampler, moved = Sampler(vocab_size, [2], "cuda"), logits.cuda()
    together, failed = sampler.sample(moved, make_rows(32))
    assert not failed
    assert [token.token_id for token in together] == [token.token_id for token in on_cpu]
    for i in range(32):
        alone, _ = sampler.sample(moved[i : i + 1].clone(), make_rows(1, first=i))
        assert alone[0].token_id == together[i].token_id


def test_random_words_are_the_same_bits() -> None:
    token_ids = torch.arange(50_000)
    seed, index, position = torch.tensor(-(2**62) + 5), torch.tensor(3), torch.tensor(77)
    words = token_words(seed, index, position, token_ids)
    moved = token_words(seed.cuda(), index.cuda(), position.cuda(), token_ids.cuda())
    assert torch.equal(moved.cpu(), words)


@pytest.mark.parametrize("vocab_size", [49_152, 50_257, 128_256])
def test_logprobs_are_the_same_bits_alone_and_in_a_batch(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(16, vocab_size, generator=generator) * 3).cuda()
    ids = torch.arange(16, device="cuda")
    together = raw_logprobs(logits, ids, 20)
    for i in range(16):
        alone = raw_logprobs(logits[i : i + 1].clone(), ids[i : i + 1], 20)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[i])


def test_a_faulty_row_fails_alone() -> None:
    logits = torch.randn(4, 50_257).cuda()
    logits[2, 99] = torch.nan
    sampled, failed = Sampler(50_257, [2], "cuda").sample(logits, make_rows(4))
    assert [token.sequence_id for token in sampled] == [0, 1, 3]
    assert [sequence_id for sequence_id, _ in failed] == [2]


@pytest.mark.parametrize("vocab_size", [49_152, 50_257])
def test_beams_have_the_candidates_of_the_cpu_and_those_alone(vocab_size: int) -> None:
    params = BeamSearchParams(beam_width=8, temperature=0.0).as_sampling_params()
    rows = [SamplingRow(i, i, 0, 0, params, [1], [2]) for i in range(16)]
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    on_cpu, _ = beam_candidates(logits, rows, 2)
    moved = logits.cuda()
    together, failed = beam_candidates(moved, rows, 2)
    assert not failed
    for i, (ours, expected) in enumerate(zip(together, on_cpu, strict=True)):
        assert ours.token_ids == expected.token_ids
        assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        row = SamplingRow(i, 0, 0, 0, params, [1], [2])
        [alone], _ = beam_candidates(moved[i : i + 1].clone(), [row], 2)
        assert alone == ours, "not the same bits"
