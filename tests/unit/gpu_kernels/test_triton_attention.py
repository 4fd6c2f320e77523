"""The triton backend against the torch reference."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
import torch

from pagewire_kernels.attention import BackendUnavailableError, load_attention_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu import attention
from pagewire_kernels.gpu.attention import TritonAttention, decode_splits, load_backend
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.attention_batch import Batch, make_batch, on_device

TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3}
BACKEND = TritonAttention(dependent_launch=False)


def attend(
    backend: TritonAttention | TorchAttention, batch: Batch, window: int | None = None
) -> torch.Tensor:
    scale = batch.query.shape[-1] ** -0.5
    return backend.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale, window
    )


def check(batch: Batch, window: int | None = None, backend: TritonAttention = BACKEND) -> None:
    got, expected = attend(backend, batch, window), attend(TorchAttention(), batch, window)
    tolerance = TOLERANCES[batch.query.dtype]
    assert got.dtype == batch.query.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


MIXED = "decodes and chunks"
BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one decode": ([1], []),
    "decodes of many lengths": ([1, 16, 65, 200], []),
    "one prompt": ([], [(100, 100)]),
    "chunks behind contexts": ([], [(77, 1), (130, 30), (64, 64), (140, 5)]),
    MIXED: ([5, 70], [(40, 40), (90, 25)]),
}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


@pytest.mark.parametrize(
    ("name", "window"),
    [*itertools.product(BATCHES, (None, 24)), *((MIXED, window) for window in (1, 1000))],
)
def test_equals_the_reference(name: str, window: int | None) -> None:
    batch = make_batch(*BATCHES[name], num_heads=3, num_kv_heads=1, dtype=torch.float16)
    check(batch, window)


@pytest.mark.parametrize("window", [None, 24])
def test_equals_the_reference_in_fp32(window: int | None) -> None:
    check(make_batch([5, 70], [(40, 15)], num_heads=2, num_kv_heads=1, head_dim=32), window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(6, 2, 80), (8, 2, 96), (7, 1, 128), (8, 1, 256), (20, 1, 16), (3, 1, 12)],
)
def test_equals_the_reference_for_any_head_layout(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    layout = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(make_batch([70], [(33, 33), (90, 21)], **layout, dtype=torch.float16), 60)


def test_smaller_tiles_where_shared_memory_is_scarce() -> None:
    batch = make_batch([], [(90, 80)], num_heads=4, num_kv_heads=1, dtype=torch.float16)
    check(batch, backend=TritonAttention(False, shared_memory=99 << 10))


def test_more_query_heads_than_a_tile_has_rows() -> None:
    batch = make_batch(
        [70], [(20, 3)], num_heads=71, num_kv_heads=1, head_dim=16, dtype=torch.float16
    )
    check(batch)


@pytest.mark.parametrize("block_size", [3, 8, 100])
def test_equals_the_reference_for_any_block_size(block_size: int) -> None:
    layout = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": block_size}
    check(make_batch([1, 150], [(131, 70)], **layout, dtype=torch.float16), 60)


@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference_for_random_mixes(seed: int) -> None:
    draw = random.Random(seed)
    decodes = [draw.randint(1, 150) for _ in range(draw.randint(0, 2))]
    contexts = [draw.randint(1, 150) for _ in range(draw.randint(1, 2))]
    chunks = [(context, draw.randint(1, context)) for context in contexts]
    batch = make_batch(
        decodes,
        chunks,
        num_heads=draw.choice([1, 3, 4, 7, 8]) * 2,
        num_kv_heads=2,
        head_dim=draw.choice([16, 24]),
        block_size=draw.choice([4, 16]),
        dtype=torch.float16,
    )
    check(batch, draw.choice([None, 1, 17, 64, 65]))


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in BATCHES), (MIXED, 24)])
def test_a_batch_that_only_the_device_knows(name: str, window: int | None) -> None:
    decodes, chunks = BATCHES[name]
    batch = make_batch(decodes, chunks[:3], num_heads=3, num_kv_heads=1, dtype=torch.float16)
    rows = len(batch.query)
    expected = attend(TorchAttention(), batch, window)
    with recorded() as launches:
        got = attend(BACKEND, on_device(batch, 7, rows + 9), window)
    torch.testing.assert_close(got[:rows], expected, atol=3e-3, rtol=3e-3)
    assert launches == {"decode_split": 1, "decode_reduce": 1, "chunk_attention": 1}


def test_a_batch_on_the_device_that_fills_its_graph() -> None:
    layout = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    batch = make_batch([70, 3], [(40, 40), (9, 1), (50, 33)], **layout)
    got = attend(BACKEND, on_device(batch, 5, len(batch.query)))
    torch.testing.assert_close(got, attend(TorchAttention(), batch), atol=2e-6, rtol=2e-6)


def test_rows_of_padding_are_zeros_and_change_no_other() -> None:
    alone = make_batch([130, 20], [], num_heads=4, num_kv_heads=2, head_dim=16)
    padded = make_batch([130, 20, 0, 0], [], num_heads=4, num_kv_heads=2, head_dim=16)
    padded.query[:2].copy_(alone.query)
    padded.key_cache, padded.value_cache = alone.key_cache, alone.value_cache
    padded.metadata.block_tables[:2].copy_(alone.metadata.block_tables)
    got = attend(BACKEND, padded)
    assert not got[2:].any()
    assert torch.equal(got[:2], attend(BACKEND, alone))


def test_sequences_without_rows_are_passed_over() -> None:
    layout = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    batch = make_batch([30], [(0, 0), (40, 12), (0, 0)], **layout)
    without = make_batch([30], [(40, 12)], **layout)
    without.key_cache, without.value_cache = batch.key_cache, batch.value_cache
    without.metadata.block_tables.copy_(batch.metadata.block_tables[[0, 2]])
    assert torch.equal(attend(BACKEND, batch), attend(BACKEND, without))


def test_lengths_come_from_the_device_alone() -> None:
    """As when a graph replays: the host's lists are those of the capture, the tensors new."""
    batch = make_batch([130, 70], [], num_heads=4, num_kv_heads=2, head_dim=16)
    expected = attend(TorchAttention(), batch)
    batch.metadata.host_context_lengths[:] = [1, 1]
    batch.metadata.host_query_start_locations[:] = []
    torch.testing.assert_close(attend(BACKEND, batch), expected, atol=2e-6, rtol=2e-6)


def test_a_fault_of_one_row_is_seen_in_it_alone() -> None:
    """NaN must not vanish where a context is split: the sampler refuses such a row."""
    batch = make_batch([150, 150], [(20, 5)], num_heads=2, num_kv_heads=1, head_dim=16)
    batch.query[1] = torch.nan
    got = attend(BACKEND, batch)
    assert got[1].isnan().all()
    assert got[[0, 2, 3, 4, 5, 6]].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([150], [(70, 40)], num_heads=2, num_kv_heads=1, head_dim=16)
    batch.query.mul_(300.0)
    got = attend(BACKEND, batch)
    assert got.isfinite().all()
    torch.testing.assert_close(got, attend(TorchAttention(), batch), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("num_programs", "capacity", "expected"),
    [
        (8, 8192, (32, 32)),
        (8, 100, (2, 2)),
        (64, 8192, (4, 4)),
        (512, 8192, (1, 1)),
        (512, 131072, (16, 1)),
        (64, 131072, (16, 4)),
        (1, 65536, (64, 64)),
    ],
)
def test_decodes_are_split_until_the_device_is_full(
    num_programs: int, capacity: int, expected: tuple[int, int]
) -> None:
    assert decode_splits(num_programs, capacity) == expected


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_are_split_further_than_the_short_ones_beside_them(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(attention, "_DECODE_PROGRAMS", 8)
    monkeypatch.setattr(attention, "_LONGEST_SPLIT", 128)
    batch = make_batch([1, 64, 257, 500], [], num_heads=2, num_kv_heads=1, head_dim=16)
    with recorded() as launches:
        got = attend(BACKEND, batch, window)
    assert launches == {"decode_split": 1, "decode_reduce": 1}
    torch.testing.assert_close(got, attend(TorchAttention(), batch, window), atol=1e-5, rtol=1e-5)


def test_each_kind_of_row_is_dispatched_to_its_kernel() -> None:
    layout = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    with recorded() as decode:
        attend(BACKEND, make_batch([16, 3], [], **layout))
    with recorded() as split:
        attend(BACKEND, make_batch([100], [], **layout))
    with recorded() as mixed:
        attend(BACKEND, make_batch([16], [(9, 9)], **layout))
    assert decode == {"decode_split": 1}
    assert split == {"decode_split": 1, "decode_reduce": 1}
    assert mixed == {"decode_split": 1, "chunk_attention": 1}


def test_fp8_keys_and_values_are_read() -> None:
    batch = make_batch(
        [90], [(60, 20)], head_dim=32, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn
    )
    got = attend(BACKEND, batch)
    batch.key_cache, batch.value_cache = batch.key_cache.half(), batch.value_cache.half()
    torch.testing.assert_close(got, attend(TorchAttention(), batch), atol=3e-3, rtol=3e-3)


@dtypes
@pytest.mark.parametrize("cache_dtype", list(TOLERANCES), ids=str)
def test_writes_strided_rows_to_their_slots(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    # Five heads of five numbers: nothing is a power of two.
    layout = {"num_heads": 5, "num_kv_heads": 5, "head_dim": 5, "block_size": 4}
    batch = make_batch([20, 3], [(9, 7)], **layout, dtype=dtype, cache_dtype=cache_dtype)
    caches = (batch.key_cache.clone(), batch.value_cache.clone())
    slots = batch.metadata.slot_mapping
    TorchAttention().write_kv(batch.key, batch.value, *caches, slots)
    BACKEND.write_kv(batch.key, batch.value, batch.key_cache, batch.value_cache, slots)
    for got, expected in zip((batch.key_cache, batch.value_cache), caches, strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_fp8_writes_round_what_is_too_large_to_the_largest() -> None:
    # The interpreter's rounding to fp8 is coarse: numbers that fp8 has, and one beyond.
    batch = make_batch([20], [], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    cache = torch.zeros((2, 16, 1, 16), dtype=torch.float8_e4m3fn)
    caches = cache.clone(), cache.clone()
    batch.key.copy_(torch.arange(16.0) * 0.5)
    batch.value.fill_(-1000.0)
    BACKEND.write_kv(batch.key, batch.value, *caches, torch.tensor([17]))
    assert torch.equal(caches[0][1, 1].float(), batch.key[0].float())
    assert torch.equal(caches[1][1, 1].float(), torch.full((1, 16), -448.0))
    assert not caches[0][0].float().any()


@dtypes
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 1, 64), (9, 3, 20)])
def test_rotation_with_the_write_equals_both_one_after_the_other(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    layout = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    batch = make_batch([30, 2, 0], [(40, 6)], **layout, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(head_dim // 2))
    positions = torch.tensor([29, 1, 0, *range(34, 40)])
    slots = batch.metadata.slot_mapping
    caches = (batch.key_cache.clone(), batch.value_cache.clone())
    written = slots >= 0
    rows = [part[written].float() for part in (batch.query, batch.key, batch.value)]
    tables = (angles.cos(), angles.sin())
    expected = TorchAttention().rotate_and_write(
        *rows, positions[written], *tables, *caches, slots[written]
    )
    with recorded() as launches:
        got = BACKEND.rotate_and_write(
            batch.query, batch.key, batch.value, positions, *tables,
            batch.key_cache, batch.value_cache, slots,
        )  # fmt: skip
    assert launches == {"write_rows": 1}
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(got[written].float(), expected, **tolerance)
    for ours, theirs in zip((batch.key_cache, batch.value_cache), caches, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance, equal_nan=True)


def test_what_the_kernels_do_not_read_is_refused() -> None:
    batch = make_batch([20], [], num_heads=2, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match="positive scale"):
        BACKEND.paged_attention(
            batch.query, batch.key_cache, batch.value_cache, batch.metadata, 0.0
        )
    batch.key_cache = batch.key_cache.transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous caches"):
        attend(BACKEND, batch)


def test_it_is_offered_on_cuda_only_and_with_triton_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="CUDA devices, not on cpu"):
        load_backend(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("pagewire_kernels.gpu.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendUnavailableError, match="pip install triton"):
        load_attention_backend("triton", "cuda")
    assert load_attention_backend("auto", "cuda").name == "torch"
