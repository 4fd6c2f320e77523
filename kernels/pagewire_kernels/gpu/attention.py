"""The `triton` backend: paged attention and cache writes on CUDA devices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from pagewire_kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    BackendUnavailableError,
)
from pagewire_kernels.gpu.attention_chunk import chunk_attention
from pagewire_kernels.gpu.attention_decode import decode_reduce, decode_split
from pagewire_kernels.gpu.attention_write import write_rows
from pagewire_kernels.gpu.launch import has_dependent_launch, launch

_LOG2_E = math.log2(math.e)
# Decodes are split until there are so many programs (an H100 has 132 multiprocessors, and four of
# these fit on one), and a context that makes splits longer than so many keys is split further.
_DECODE_PROGRAMS = 256
_LONGEST_SPLIT = 8192
_MOST_SPLITS = 64
_REDUCED_AT_ONCE = 16
_HEADS_WRITTEN_AT_ONCE = 8
_AMPLE_SHARED_MEMORY = 161 << 10


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut up.

    Attributes:
        rows: rows of queries in a tile.
        keys: keys in a tile.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline that loads keys and values.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(padded_dim: int, group: int, item_size: int) -> Tile:
    """For heads of padded_dim numbers of item_size bytes, `group` query heads sharing a kv head.

    16 rows, 64 keys and 4 stages were measured best on an H100 at 128 bf16 numbers (3.03 TB/s of
    keys and values at 64 sequences of 8192); larger heads keep to the same shared memory.
    """
    rows = min(_padded(group), 64)
    head_bytes = padded_dim * item_size
    keys = max(16, min(64, 64 * 256 // head_bytes))
    return Tile(rows, keys, num_warps=2 if head_bytes <= 128 else 4, num_stages=4)


def chunk_tile(padded_dim: int, item_size: int, shared_memory: int) -> Tile:
    """For heads of padded_dim numbers of item_size bytes.

    Two stages go to the block table, which has to be there before a key's address is known, and
    two to what is being computed with: from 5 on a tile of keys is loaded while another is in use,
    with fewer each is waited for. 128 rows fill the registers of a multiprocessor. That takes up to
    161 KiB of shared_memory; where a program can have less, tiles fit the 99 KiB that all have.
    """
    if item_size > 2:
        # No tensor cores: the products are unrolled, and tiles stay small.
        return Tile(16, 32 if padded_dim <= 128 else 16, num_warps=4, num_stages=2)
    keys = 64 if padded_dim <= 128 else 32
    if shared_memory < _AMPLE_SHARED_MEMORY:
        return Tile(64, keys, num_warps=4, num_stages=3)
    return Tile(128, keys, num_warps=8, num_stages=5)


def decode_splits(num_programs: int, capacity: int) -> tuple[int, int]:
    """Over how many programs each sequence's keys are spread.

    Args:
        num_programs: without a split: sequences times kv heads (and tiles of their query heads).
        capacity: keys that the block tables have room for.

    Returns:
        How many are launched, and how many of them are enough for contexts that are not long: what
        a context does not need ends at once.
    """
    most = min(_MOST_SPLITS, _ceil_div(capacity, 64))
    wanted = max(1, min(_ceil_div(_DECODE_PROGRAMS, num_programs), most))
    return max(wanted, min(_ceil_div(capacity, _LONGEST_SPLIT), most)), wanted


class TritonAttention(AttentionBackend):
    """Kernels for decodes, for chunks, and for cache writes fused with the rotation.

    Decoding, and chunks of a batch that is on the device, read nothing but tensors and their
    shapes, so that a CUDA graph can replay them for other lengths; a context of 0 gives zeros, and
    a token with a negative slot is not written.
    """

    name = "triton"
    head_dim_multiple = 1
    fuses_rotation = True
    capturable = True
    captures_chunks = True

    def __init__(self, dependent_launch: bool, shared_memory: int = _AMPLE_SHARED_MEMORY) -> None:
        """
        Args:
            dependent_launch: whether the device knows programmatic dependent launch.
            shared_memory: bytes of it that a program can have.
        """
        self.dependent_launch = dependent_launch
        self.shared_memory = shared_memory

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._write(key, value, key_cache, value_cache, slot_mapping)

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionBackend.rotate_and_write; the query is rotated in place, in fp32."""
        if cos.shape[1] * 2 != key.shape[2]:
            raise ValueError(f"tables of {cos.shape[1]} angles for heads of {key.shape[2]}")
        rotation = (query, positions, cos, sin)
        self._write(key, value, key_cache, value_cache, slot_mapping, rotation)
        return query

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        _check(query, key_cache, value_cache, metadata.block_tables, scale)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        arguments = (query, key_cache, value_cache, metadata, scale, sliding_window or 0, output)
        if metadata.num_decodes:
            self._decode(*arguments)
        if metadata.on_device or metadata.context_lengths.shape[0] > metadata.num_decodes:
            self.attend_chunks(*arguments)
        return output

    def _write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        # Not read without a rotation; a kernel's pointers must point somewhere.
        query, positions, cos, sin = rotation or (key, slot_mapping, slot_mapping, slot_mapping)
        programs = 2 * _ceil_div(num_kv_heads, _HEADS_WRITTEN_AT_ONCE)
        if rotation is not None:
            programs += _ceil_div(query.shape[1], _HEADS_WRITTEN_AT_ONCE)
        launch(
            write_rows,
            (num_tokens, programs),
            query,
            key,
            value,
            positions,
            cos,
            sin,
            key_cache,
            value_cache,
            slot_mapping,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            NUM_HEADS=query.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_HALF=_padded(head_dim) // 2,
            HEADS=_HEADS_WRITTEN_AT_ONCE,
            ROTATE=rotation is not None,
            DEPENDENT=self.dependent_launch,
            dependent=self.dependent_launch,
            num_warps=2,
        )

    def _decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        output: torch.Tensor,
    ) -> None:
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        num_rows = metadata.num_decodes
        group = num_heads // num_kv_heads
        padded_dim = _padded(head_dim)
        item_size = max(query.element_size(), key_cache.element_size())
        tile = decode_tile(padded_dim, group, item_size)
        programs = num_kv_heads * _ceil_div(group, tile.rows)
        capacity = metadata.block_tables.shape[1] * block_size
        if window:
            capacity = min(capacity, window + tile.keys)
        if metadata.on_device is None:
            num_decodes, most_splits = metadata.context_lengths, 0
            num_splits, wanted_splits = decode_splits(num_rows * programs, capacity)
            grid, num_parts = (programs, num_splits, num_rows), num_rows * num_splits
            num_reduced = num_rows if num_splits > 1 else 0
        else:
            num_decodes, most_splits = metadata.on_device.num_decodes, _MOST_SPLITS
            num_splits = wanted_splits = max(num_rows, _ceil_div(_DECODE_PROGRAMS, programs))
            grid, num_parts = (programs, num_splits, 1), num_splits
            # More decodes than that are not split.
            num_reduced = num_splits // 2
        parts = weights = output
        if num_reduced:
            size = num_parts * num_heads
            parts = torch.empty((size, head_dim), dtype=torch.float32, device=query.device)
            weights = torch.empty(size, dtype=torch.float32, device=query.device)
        launch(
            decode_split,
            grid,
            query,
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.context_lengths,
            output,
            parts,
            weights,
            num_decodes,
            scale * _LOG2_E,
            query.stride(0),
            metadata.block_tables.stride(0),
            num_splits,
            wanted_splits,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size,
            WINDOW=window,
            ROWS=tile.rows,
            BLOCK_N=tile.keys,
            STAGES=tile.num_stages,
            LONGEST=_LONGEST_SPLIT,
            WHOLE=num_reduced == 0,
            MOST=most_splits,
            DEPENDENT=self.dependent_launch,
            dependent=self.dependent_launch,
            num_warps=tile.num_warps,
        )
        if num_reduced:
            launch(
                decode_reduce,
                (num_reduced * num_heads,),
                parts,
                weights,
                metadata.context_lengths,
                output,
                num_decodes,
                num_splits,
                wanted_splits,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                WINDOW=window,
                BLOCK_N=tile.keys,
                LONGEST=_LONGEST_SPLIT,
                SPLITS=_REDUCED_AT_ONCE,
                MOST=most_splits,
                DEPENDENT=self.dependent_launch,
                dependent=self.dependent_launch,
                num_warps=2,
            )

    def attend_chunks(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        output: torch.Tensor,
    ) -> None:
        """The rows after the decodes; window 0: all keys are visible."""
        _, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        first, num_sequences = metadata.num_decodes, metadata.context_lengths.shape[0]
        group = num_heads // num_kv_heads
        padded_dim = _padded(head_dim)
        item_size = max(query.element_size(), key_cache.element_size())
        tile = chunk_tile(padded_dim, item_size, self.shared_memory)
        packed = min(group, tile.rows)
        tokens, programs = tile.rows // packed, num_kv_heads * _ceil_div(group, packed)
        if metadata.on_device is None:
            num_decodes, counted = metadata.context_lengths, 0
            grid = (_ceil_div(_longest_chunk(metadata), tokens), programs, num_sequences - first)
        else:
            num_decodes, counted = metadata.on_device.num_decodes, num_sequences
            # Each chunk may end within a tile.
            grid = (query.shape[0] // tokens + metadata.on_device.max_chunks, programs, 1)
        launch(
            chunk_attention,
            grid,
            query,
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.query_start_locations,
            metadata.context_lengths,
            output,
            num_decodes,
            scale * _LOG2_E,
            query.stride(0),
            metadata.block_tables.stride(0),
            first,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size,
            WINDOW=window,
            ROWS=tile.rows,
            PACKED_HEADS=packed,
            BLOCK_N=tile.keys,
            STAGES=tile.num_stages,
            SEQUENCES=counted,
            PADDED_SEQUENCES=_padded(counted),
            num_warps=tile.num_warps,
        )


def load_backend(device: torch.device) -> TritonAttention:
    """The Triton backend.

    Raises:
        BackendUnavailableError: not a CUDA device.
    """
    if device.type != "cuda":
        raise BackendUnavailableError(
            f"attention backend 'triton' runs on CUDA devices, not on {device}; "
            "use --attention-backend auto, or --device cuda"
        )
    properties = torch.cuda.get_device_properties(device)
    # ROCm's properties don't say.
    shared_memory: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return TritonAttention(has_dependent_launch(device), shared_memory)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> None:
    """The kernels trust their pointers: what they can't read is refused here.

    Raises:
        ValueError: memory layout or scale that the kernels do not read.
    """
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("the triton attention backend reads contiguous caches only")
    if query.stride()[1:] != (query.shape[2], 1) or block_tables.stride(1) != 1:
        raise ValueError("a token's heads and a sequence's block table must be contiguous")
    if scale <= 0:
        raise ValueError(f"the triton attention backend needs a positive scale, not {scale}")


def _longest_chunk(metadata: AttentionMetadata) -> int:
    """The most rows of a sequence that is not a decode; the same for every layer."""
    longest: int | None = metadata.derived.get("triton.longest_chunk")
    if longest is None:
        starts = metadata.host_query_start_locations[metadata.num_decodes :]
        longest = max(stop - start for start, stop in itertools.pairwise(starts))
        metadata.derived["triton.longest_chunk"] = longest
    return longest


def _padded(size: int) -> int:
    """The side of a tile that holds so much: a power of two, for products at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
