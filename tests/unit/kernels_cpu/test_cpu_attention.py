"""The C++ attention backend against the torch reference and against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagewire_kernels import cpu
from pagewire_kernels.attention import AttentionMetadata
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.attention_batch import Batch, make_batch

pytestmark = pytest.mark.usefixtures("built_kernels")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Of queries in fp32, by the caches' dtype: matrix registers take them as two bfloat16.
WIDE_TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-5}


@pytest.fixture
def backend() -> cpu.CpuAttention:
    return cpu.load_backend(torch.device("cpu"))


def attend(
    backend: cpu.CpuAttention | TorchAttention, batch: Batch, window: int | None = None
) -> torch.Tensor:
    scale = batch.query.shape[-1] ** -0.5
    return backend.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale, window
    )


BATCHES = {
    "one decode": ([1], []),
    "decodes of many lengths": ([1, 15, 16, 17, 63, 64, 65, 200, 333], []),
    "one prompt": ([], [(100, 100)]),
    "a chunk of one token": ([], [(77, 1)]),
    "chunks behind contexts": ([], [(130, 30), (64, 64), (257, 5)]),
    "decodes and chunks": ([5, 70], [(40, 40), (90, 25)]),
}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("window", [None, 1, 24, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_reference(
    backend: cpu.CpuAttention, name: str, window: int | None, dtype: torch.dtype
) -> None:
    batch = make_batch(*BATCHES[name], dtype=dtype)
    got = attend(backend, batch, window)
    expected = attend(TorchAttention(), batch, window)
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (5, 1), (32, 4)])
@pytest.mark.parametrize("cache_dtype", list(WIDE_TOLERANCES), ids=str)
def test_equals_the_reference_for_any_head_layout(
    backend: cpu.CpuAttention,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_dtype: torch.dtype,
) -> None:
    batch = make_batch(
        [19, 70],
        [(33, 33), (90, 21)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cache_dtype=cache_dtype,
    )
    within = WIDE_TOLERANCES[cache_dtype]
    torch.testing.assert_close(
        attend(backend, batch), attend(TorchAttention(), batch), atol=within, rtol=within
    )


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 100, 256])
@pytest.mark.parametrize("cache_dtype", list(WIDE_TOLERANCES), ids=str)
def test_equals_the_reference_for_any_block_size(
    backend: cpu.CpuAttention, block_size: int, cache_dtype: torch.dtype
) -> None:
    batch = make_batch([1, 150], [(131, 70)], block_size=block_size, cache_dtype=cache_dtype)
    within = WIDE_TOLERANCES[cache_dtype]
    torch.testing.assert_close(
        attend(backend, batch, 60), attend(TorchAttention(), batch, 60), atol=within, rtol=within
    )


@pytest.mark.parametrize(("cache_dtype", "within"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
def test_large_scores_do_not_overflow(
    backend: cpu.CpuAttention, cache_dtype: torch.dtype, within: float
) -> None:
    batch = make_batch([200], [(150, 80)], cache_dtype=cache_dtype)
    batch.query.mul_(300.0)
    got = attend(backend, batch)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, attend(TorchAttention(), batch), atol=within, rtol=within)


@pytest.mark.parametrize("cache_dtype", list(WIDE_TOLERANCES), ids=str)
def test_a_token_attends_alike_as_a_decode_and_in_a_chunk(
    backend: cpu.CpuAttention, cache_dtype: torch.dtype
) -> None:
    """A preempted sequence's tokens are computed again as a prompt."""
    batch = make_batch([], [(150, 40)], cache_dtype=cache_dtype)
    chunk = attend(backend, batch)
    within = WIDE_TOLERANCES[cache_dtype]
    for i in range(40):
        decode = attend(backend, _rows(batch, i, i + 1, 1, 0, 111 + i))
        torch.testing.assert_close(decode, chunk[i : i + 1], atol=within, rtol=within)


def _rows(batch: Batch, first: int, last: int, decodes: int, sequence: int, context: int) -> Batch:
    """The rows [first, last) of one sequence as a batch of their own."""
    old = batch.metadata
    metadata = AttentionMetadata.from_host(
        np.array([0, last - first], np.int32),
        np.array([context], np.int32),
        old.block_tables[sequence : sequence + 1].numpy().copy(),
        old.slot_mapping[first:last].numpy().copy(),
        decodes,
    )
    return Batch(
        batch.query[first:last],
        batch.key[first:last],
        batch.value[first:last],
        batch.key_cache,
        batch.value_cache,
        metadata,
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache_dtype", list(WIDE_TOLERANCES), ids=str)
def test_same_bits_alone_in_a_batch_and_in_chunks(
    backend: cpu.CpuAttention, threads: int, cache_dtype: torch.dtype
) -> None:
    decodes = [1, 70, 200, 33, 64, 90, 5, 129, 256]
    batch = make_batch(decodes, [(150, 150), (300, 40)], cache_dtype=cache_dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attend(backend, batch)
        for s, context in enumerate(batch.metadata.host_context_lengths[:9]):
            assert torch.equal(
                attend(backend, _rows(batch, s, s + 1, 1, s, context)), together[s : s + 1]
            )
        for first, last in [(0, 150), (0, 7), (7, 64), (64, 65), (65, 150)]:
            part = _rows(batch, 9 + first, 9 + last, 0, 9, last)
            assert torch.equal(attend(backend, part), together[9 + first : 9 + last])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_writes_strided_rows_to_their_slots(backend: cpu.CpuAttention, dtype: torch.dtype) -> None:
    batch = make_batch([20, 3], [(50, 30)], dtype=dtype)
    caches = (batch.key_cache.clone(), batch.value_cache.clone())
    slots = batch.metadata.slot_mapping
    TorchAttention().write_kv(batch.key, batch.value, caches[0], caches[1], slots)
    backend.write_kv(
        batch.key, batch.value, batch.key_cache, batch.value_cache, batch.metadata.slot_mapping
    )
    for got, expected in zip((batch.key_cache, batch.value_cache), caches, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_the_kernels_bring_no_second_openmp(backend: cpu.CpuAttention) -> None:
    """Two OpenMP runtimes in a process would spin against each other; the kernels bring none."""
    attend(backend, make_batch([20] * 8, []))
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(runtimes) <= 1


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [(12, torch.float32, "head size divisible by 8"), (8, torch.float64, "float32, bfloat16")],
)
def test_what_the_kernels_do_not_read_is_refused(
    backend: cpu.CpuAttention, head_dim: int, dtype: torch.dtype, message: str
) -> None:
    batch = make_batch([20], [], head_dim=head_dim, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        attend(backend, batch)
