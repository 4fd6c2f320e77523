"""Paged attention: one interface over several backends, and the registry that finds them.

Keys and values of a layer live in two tensors of shape [num_blocks, block_size, num_kv_heads,
head_dim]. A sequence's block table names, in order, the blocks that hold its tokens; slot `block *
block_size + offset` is one token's place. See PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagewire_kernels import ops


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and can't run here; the message says what to do."""


@dataclass(frozen=True)
class DeviceCounts:
    """Of a batch that the device alone knows, as in a CUDA graph that serves many: what it holds.

    The metadata's sizes are then the most there can be, of sequences, rows and decodes; its lists
    are empty. Sequences past the last have a context of 0 and no rows; rows past the last one's
    belong to none, and their slots are -1.

    Attributes:
        num_decodes: int32 [1].
        max_chunks: most sequences that are not decodes.
    """

    num_decodes: torch.Tensor
    max_chunks: int


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention must know of a step's flat batch of T tokens from S sequences.

    Sequences that compute one token (decodes) come first. What the host knows anyway is kept as
    lists beside the tensors, so that no backend has to wait for a device to read a length.

    Attributes:
        query_start_locations: int32 [S + 1]; sequence s owns rows [q[s], q[s + 1]).
        context_lengths: int32 [S]; tokens in the cache after this step's are written.
        block_tables: int32 [S, W], padded with 0 beyond a sequence's blocks.
        slot_mapping: int64 [T]; where each token's key and value are written.
        num_decodes: the first so many sequences have one query token each.
        host_query_start_locations: the same numbers as a list.
        host_context_lengths: the same numbers as a list.
        on_device: where only the device knows what the batch holds; for backends that capture
            chunks.
        derived: what a backend computes once a step and uses in every layer; its own keys.
    """

    query_start_locations: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    host_query_start_locations: list[int]
    host_context_lengths: list[int]
    on_device: DeviceCounts | None = None
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_host(
        cls,
        query_start_locations: npt.NDArray[np.int32],
        context_lengths: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64],
        num_decodes: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Moves a step's numpy arrays to the device (on CPU they are shared, not copied)."""

        def move(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            query_start_locations=move(query_start_locations),
            context_lengths=move(context_lengths),
            block_tables=move(block_tables),
            slot_mapping=move(slot_mapping),
            num_decodes=num_decodes,
            host_query_start_locations=query_start_locations.tolist(),
            host_context_lengths=context_lengths.tolist(),
        )


class AttentionBackend(Protocol):
    """Cache writes and attention of one layer. Stateless: one instance serves all layers.

    Backends derive from it for the operations it composes of others.

    Attributes:
        name: what the settings call it.
        head_dim_multiple: head sizes it can do are multiples of this.
        fuses_rotation: whether `rotate_and_write` is one launch. Where it is not, a caller that
            rotates query and key together, and looks angles up once a step, is faster.
        capturable: whether decodes read nothing of a step but its tensors and take rows of padding,
            so that a CUDA graph can replay them: rows with a context of 0 and a slot of -1.
        captures_chunks: whether chunks do so as well: see AttentionMetadata.on_device.
    """

    name: str
    head_dim_multiple: int
    fuses_rotation: bool = False
    capturable: bool = False
    captures_chunks: bool = False

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores key and value, each [T, num_kv_heads, head_dim], at slots int64 [T].

        The last two dimensions of key and value are contiguous; their rows may be strided (views
        of a packed qkv). Where the caches have another dtype, values are rounded to it.
        """
        ...

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
        """Rotates query and key (see ops.rotate), and stores key and value as `write_kv` does.

        Args:
            query: [T, num_heads, head_dim], of the same layout as key; may be overwritten.
            key: [T, num_kv_heads, head_dim]; may be overwritten.
            value: the same.
            positions: int64 [T], rows of the tables.
            cos: fp32 [max_positions, head_dim / 2].
            sin: the same.
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            value_cache: the same.
            slot_mapping: int64 [T].

        Returns:
            The rotated query.
        """
        rotation = ops.gather_rotation(cos, sin, positions, query.dtype)
        rotated_key = ops.rotate(key, *rotation)
        self.write_kv(rotated_key, value, key_cache, value_cache, slot_mapping)
        return ops.rotate(query, *rotation)

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of each token over its sequence's cached keys, its own included.

        Args:
            query: [T, num_heads, head_dim], rows may be strided; query head h reads kv head
                h // (num_heads / num_kv_heads).
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
            value_cache: the same.
            metadata: the step's batch.
            scale: factor on query-key products.
            sliding_window: None, or key j is visible to query i only if i - j < sliding_window.

        Returns:
            [T, num_heads, head_dim], contiguous, of the query's dtype; scores and softmax are fp32.
            What lies in a block beyond a sequence's context never influences the result, NaN
            included.
        """
        ...


_BACKEND_MODULES = {
    "torch": "pagewire_kernels.torch_attention",
    "cpu": "pagewire_kernels.cpu",
    "triton": "pagewire_kernels.gpu.attention",
    "xformers": "pagewire_kernels.xformers_attention",
}
# By type of device; torch serves where it is not installed.
_AUTOMATIC = {"cpu": "cpu", "cuda": "triton"}


def load_attention_backend(
    name: str, device: torch.device | str, head_dim: int | None = None
) -> AttentionBackend:
    """The backend of that name, or for `auto` the fastest one that is installed and fits.

    A backend's module offers `load_backend(device) -> AttentionBackend`, which raises
    BackendUnavailableError saying how to install what is missing.

    Args:
        name: `auto`, or one of the backends.
        device: where the model lives.
        head_dim: its heads' size; None: not known yet.

    Raises:
        BackendUnavailableError: a backend asked for by name can't run here, or not this model.
    """
    device = torch.device(device)
    if name == "auto":
        try:
            return load_attention_backend(_AUTOMATIC.get(device.type, "torch"), device, head_dim)
        except BackendUnavailableError:
            return load_attention_backend("torch", device, head_dim)
    if name not in _BACKEND_MODULES:
        raise BackendUnavailableError(
            f"there is no attention backend {name!r}; choose one of {', '.join(_BACKEND_MODULES)}"
        )
    backend = _import_backend(name, device)
    if head_dim is not None and head_dim % backend.head_dim_multiple:
        raise BackendUnavailableError(
            f"attention backend {name!r} needs a head size divisible by "
            f"{backend.head_dim_multiple}, not {head_dim}; use --attention-backend torch"
        )
    return backend


def _import_backend(name: str, device: torch.device) -> AttentionBackend:
    module_name = _BACKEND_MODULES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "triton":
            raise BackendUnavailableError(
                f"attention backend {name!r} needs triton, which CUDA builds of torch bring; "
                "run `pip install triton`, or use --attention-backend torch"
            ) from error
        if error.name != module_name:
            raise
        raise BackendUnavailableError(
            f"attention backend {name!r} is not part of this installation; "
            "reinstall pagewire with its engine extra, or use --attention-backend torch"
        ) from error
    backend: AttentionBackend = module.load_backend(device)
    return backend
