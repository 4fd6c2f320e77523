"""The triton backend on a CUDA device against the torch reference in fp32."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from pagewire_kernels.attention import AttentionBackend, load_attention_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.attention_batch import Batch, make_batch, on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8 = torch.float8_e4m3fn
BATCHES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "few decodes": ([1, 300, 2049], []),
    "many decodes": ([*range(1, 40), *range(1000, 1024)], []),
    "prompts": ([], [(1000, 1000), (513, 513), (17, 17)]),
    "decodes and chunks": ([1, 700, 64], [(900, 130), (300, 300), (65, 2)]),
}
LAYOUTS = {
    "llama 8B": (32, 8, 128),
    "llama 1B": (32, 8, 64),
    "three heads of a kv head": (9, 3, 64),
    "seven heads of a kv head": (28, 4, 128),
    "no sharing, 80": (12, 12, 80),
    "96": (16, 2, 96),
    "256": (8, 1, 256),
    "more heads than a tile": (71, 1, 64),
}


def attend(backend: AttentionBackend, batch: Batch, window: int | None = None) -> torch.Tensor:
    scale = batch.query.shape[-1] ** -0.5
    return backend.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, scale, window
    )


def reference(batch: Batch, window: int | None = None) -> torch.Tensor:
    """In fp32 throughout, of the same rounded numbers."""
    wide = dataclasses.replace(
        batch,
        query=batch.query.float(),
        key_cache=batch.key_cache.to(batch.query.dtype).float(),
        value_cache=batch.value_cache.to(batch.query.dtype).float(),
        metadata=copy.copy(batch.metadata),
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return attend(TorchAttention(), wide, window)


def check(batch: Batch, window: int | None = None) -> None:
    """Equal, and by the kernels that these rows are for."""
    backend = load_attention_backend("triton", "cuda", batch.query.shape[-1])
    with recorded() as launches:
        got = attend(backend, batch, window)
    expected = reference(batch, window)
    num_sequences, num_decodes = len(batch.metadata.context_lengths), batch.metadata.num_decodes
    kernels = {"decode_split"} if num_decodes else set()
    kernels |= {"chunk_attention"} if num_sequences > num_decodes else set()
    assert set(launches) - {"decode_reduce"} == kernels
    assert got.dtype == batch.query.dtype
    tolerance = TOLERANCES[batch.query.dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_auto_is_triton_on_cuda() -> None:
    assert load_attention_backend("auto", "cuda").name == "triton"


def bf16_batch(layout: str, name: str) -> Batch:
    num_heads, num_kv_heads, head_dim = LAYOUTS[layout]
    return make_batch(
        *BATCHES[name],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_reference_in_bf16(layout: str, name: str) -> None:
    check(bf16_batch(layout, name))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layout", ["llama 8B", "seven heads of a kv head"])
def test_equals_the_reference_under_a_window(layout: str, name: str) -> None:
    check(bf16_batch(layout, name), 100)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layout", ["llama 8B", "llama 1B", "seven heads of a kv head", "256"])
def test_a_graph_of_a_batch_that_only_the_device_knows(
    layout: str, name: str, window: int | None
) -> None:
    batch = bf16_batch(layout, name)
    rows = len(batch.query)
    expected = reference(batch, window)
    inside = on_device(batch, sequences=len(batch.metadata.context_lengths) + 5, tokens=rows + 70)
    backend = load_attention_backend("triton", "cuda", batch.query.shape[-1])
    attend(backend, inside, window)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(backend, inside, window)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(got[:rows].float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equals_the_reference_in_smaller_tiles(head_dim: int) -> None:
    """As on devices with less shared memory."""
    layout = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim}
    batch = make_batch(*BATCHES["prompts"], **layout, dtype=torch.bfloat16, device="cuda")
    from pagewire_kernels.gpu.attention import TritonAttention, load_backend

    dependent = load_backend(torch.device("cuda")).dependent_launch
    got = attend(TritonAttention(dependent, shared_memory=99 << 10), batch)
    torch.testing.assert_close(got.float(), reference(batch), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        (torch.float32, 64, 8),
        (torch.float32, 128, 16),
        (torch.float16, 128, 32),
        (torch.float16, 256, 8),
    ],
    ids=str,
)
def test_equals_the_reference_in_other_dtypes(
    dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    layout = {"num_heads": 8, "num_kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    check(make_batch(*BATCHES["decodes and chunks"], **layout, dtype=dtype, device="cuda"))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, FP8),
        (torch.float16, FP8),
        (torch.float32, FP8),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_caches_of_other_dtypes_are_read(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    layout = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    for name in ("few decodes", "decodes and chunks"):
        check(
            make_batch(
                *BATCHES[name], **layout, dtype=dtype, cache_dtype=cache_dtype, device="cuda"
            )
        )


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_writes_are_the_references_bits(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = make_batch([100, 30], [(400, 300)], dtype=dtype, device="cuda")
    batch.key.mul_(200.0)  # some beyond what fp8 has
    caches = [torch.zeros(batch.key_cache.shape, dtype=cache_dtype, device="cuda") for _ in "kvkv"]
    slots = batch.metadata.slot_mapping
    TorchAttention().write_kv(batch.key, batch.value, caches[0], caches[1], slots)
    load_attention_backend("triton", "cuda").write_kv(
        batch.key, batch.value, caches[2], caches[3], slots
    )
    for expected, got in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_rotation_equals_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    batch = make_batch([100, 30], [(400, 300)], head_dim=head_dim, dtype=dtype, device="cuda")
    angles = torch.outer(torch.arange(500.0), torch.rand(head_dim // 2)).cuda()
    positions = torch.tensor([99, 29, *range(100, 400)]).cuda()
    caches = (torch.zeros_like(batch.key_cache), torch.zeros_like(batch.value_cache))
    wide = tuple(cache.float() for cache in caches)
    rows = [part.float() for part in (batch.query, batch.key, batch.value)]
    where = (positions, angles.cos(), angles.sin())
    slots = batch.metadata.slot_mapping
    expected = TorchAttention().rotate_and_write(*rows, *where, *wide, slots)
    got = load_attention_backend("triton", "cuda").rotate_and_write(
        batch.query, batch.key, batch.value, *where, *caches, slots
    )
    tolerance = TOLERANCES[dtype]
    for ours, theirs in ((got, expected), (caches[0], wide[0]), (caches[1], wide[1])):
        torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=tolerance)


def test_blocks_beyond_two_billion_numbers_are_found() -> None:
    """32-bit offsets would end at block 131072 of this shape."""
    num_blocks, shape = 140_000, (16, 8, 128)
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * num_blocks * 16 * 8 * 128 * 2:
        pytest.skip("needs 14 GiB of free GPU memory")
    small = make_batch(
        [300, 2], [(90, 40)], num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    backend = load_attention_backend("triton", "cuda")
    backend.write_kv(
        small.key, small.value, small.key_cache, small.value_cache, small.metadata.slot_mapping
    )
    expected = attend(backend, small)
    shift = num_blocks - len(small.key_cache)
    large = [torch.zeros((num_blocks, *shape), dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    for cache, old in zip(large, (small.key_cache, small.value_cache), strict=True):
        cache[shift:] = old
    slots = small.metadata.slot_mapping + shift * 16
    for cache in large:
        cache.view(-1, 8, 128)[slots] = 0.0
    backend.write_kv(small.key, small.value, *large, slots)
    small.metadata.block_tables.add_(shift)
    small.key_cache, small.value_cache = large
    assert torch.equal(attend(backend, small), expected)


class Chain:
    """Layers in which each reads what the one before wrote, a moment ago."""

    def __init__(self, batch: Batch, num_layers: int = 12) -> None:
        self._batch = batch
        size = len(batch.query), batch.query.shape[1] + 2 * batch.key.shape[1], 128
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.hidden = torch.randn(size, generator=generator, device="cuda").to(batch.query.dtype)
        self._caches = [
            (torch.zeros_like(batch.key_cache), torch.zeros_like(batch.value_cache))
            for _ in range(num_layers)
        ]
        angles = torch.outer(torch.arange(4096.0), torch.rand(64)).cuda()
        self._tables = angles.cos(), angles.sin()
        self.positions = (batch.metadata.context_lengths - 1).clamp(min=0).long()

    def __call__(self, backend: AttentionBackend) -> torch.Tensor:
        num_heads, num_kv_heads = self._batch.query.shape[1], self._batch.key.shape[1]
        heads = self.hidden.clone()
        for caches in self._caches:
            query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            slots = self._batch.metadata.slot_mapping
            query = backend.rotate_and_write(
                query, key, value, self.positions, *self._tables, *caches, slots
            )
            attended = backend.paged_attention(query, *caches, self._batch.metadata, 0.1)
            # The first heads again as keys and values of the next layer, read where they lie.
            heads = attended.repeat(1, 2, 1)[:, : num_heads + 2 * num_kv_heads]
        return heads


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_graph_of_dependent_launches_repeats_the_same_bits(num_rows: int) -> None:
    """Kernels that start early must wait for what they read; lengths and padding may change."""
    backend = load_attention_backend("triton", "cuda")
    layout: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    contexts = [1 + 37 * i for i in range(num_rows)]
    batch = make_batch(contexts, [], **layout, dtype=torch.bfloat16, device="cuda")
    chain = Chain(batch)
    chain(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(backend)
    for length in (None, 3):
        if length is not None:
            # The last row becomes padding, and others shorter.
            batch.metadata.context_lengths.clamp_(max=length)
            batch.metadata.context_lengths[-1] = 0
            batch.metadata.slot_mapping[-1] = -1
        torch.cuda.synchronize()
        expected = _step_by_step(chain, backend)
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(replayed, expected)
    assert not replayed[-1].any()


def _step_by_step(chain: Chain, backend: AttentionBackend) -> torch.Tensor:
    """The same with the device idle between any two operations."""

    class Waiting:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                torch.cuda.synchronize()
                result = getattr(backend, name)(*arguments)
                torch.cuda.synchronize()
                return result

            return call

    return chain(Waiting())  # type: ignore[arg-type]  # stands in for the backend
