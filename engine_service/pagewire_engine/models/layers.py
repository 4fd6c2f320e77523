"""The layers models are made of. Each tells which checkpoint tensors fill it.

Attribute names in the models follow Hugging Face's, so that a module's path is its checkpoint name.
Parameters are allocated, not initialised: the loader fills every one of them exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from pagewire_kernels import ops
from pagewire_kernels.attention import AttentionBackend, AttentionMetadata
from pagewire_kernels.dense import DenseBackend, TorchDense
from pagewire_kernels.lora import LoraRows, LoraShape, LoraTable
from pagewire_kernels.quantization import quantize_int8


@dataclass(frozen=True)
class ForwardContext:
    """What a step gives to the attention layers besides their inputs.

    Attributes:
        backend: the attention backend.
        metadata: the step's batch.
        key_caches: one [num_blocks, block_size, num_kv_heads, head_dim] a layer.
        value_caches: the same.
        wanted_rows: int32 [R], the rows whose hidden states a model is to return, for a step in
            which no row has an adapter: what others would be in the last layer is not computed.
            None: all.
    """

    backend: AttentionBackend
    metadata: AttentionMetadata
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    wanted_rows: torch.Tensor | None = None

    def wanted(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [T, size] the rows that are wanted."""
        return hidden if self.wanted_rows is None else hidden.index_select(0, self.wanted_rows)


@dataclass(frozen=True)
class Rotation:
    """Where a step's tokens stand, and the angles of every position.

    Attributes:
        positions: int64 [T].
        cos: fp32 [max_positions, head_dim / 2].
        sin: the same.
        dtype: of queries and keys.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    dtype: torch.dtype

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' cosines and sines as DenseBackend.rotate takes them; looked up once."""
        return ops.gather_rotation(self.cos, self.sin, self.positions, self.dtype)


class ActiveAdapters:
    """Which adapter each row of the present step has: one object for all layers of a model.

    Attributes:
        rows: of the step's T tokens; None: no row has one.
    """

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


@dataclass(frozen=True)
class LayerAdapters:
    """A layer's adapters, and who uses them now."""

    table: LoraTable
    active: ActiveAdapters


class KernelUser(nn.Module):
    """A module that computes with a dense backend: torch, until `use_kernels` says otherwise."""

    dense: DenseBackend = TorchDense()

    def use_kernels(self, dense: DenseBackend) -> None:
        """Changes to another backend. Weights that it packs are not kept unpacked beside that."""
        self.dense = dense
        for vector in self.parameters(recurse=False):
            vector.data = vector.data.to(dense.activations(vector.dtype))


class Layer(KernelUser):
    """A module with parameters of its own."""

    def new_parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint name and the place (a view of a parameter) its values go to.

        Args:
            path: this module's path in the model.
        """
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter


class MatrixLayer(Layer):
    """A layer whose weight [rows, columns] may be kept quantised, or in a backend's packed form."""

    weight: nn.Parameter
    packed: Any = None
    adapters: LayerAdapters | None = None
    is_embedding: ClassVar[bool] = False

    @property
    def adapter_rows(self) -> LoraRows | None:
        """The adapter of each row of the step, if any row has one."""
        return None if self.adapters is None else self.adapters.active.rows

    def adapted_parts(self, path: str) -> dict[str, int]:
        """What adapters know of this layer: modules by name, and the outputs of each.

        Args:
            path: this module's path in the model.
        """
        return {path: self.lora_shape().outputs}

    def lora_shape(self) -> LoraShape:
        """The sizes that adapters must have."""
        raise NotImplementedError

    @property
    def matrix(self) -> Any:
        """What the backend's functions take."""
        return self.weight if self.packed is None else self.packed

    def rows_of_weight(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as it is computed with: int64 [N] to [N, columns]."""
        return self.dense.unpack_rows(self.matrix, rows)

    def quantize(self) -> None:
        """Rounds the weight to int8, once it is filled; the original is let go of."""
        self._replace(quantize_int8(self.weight))

    def use_kernels(self, dense: DenseBackend) -> None:
        packed = dense.pack(self.matrix)
        if packed is not self.matrix:
            self._replace(packed)
        super().use_kernels(dense)

    def _replace(self, packed: Any) -> None:
        self.packed = packed
        if "weight" in self._parameters:
            del self.weight


class Linear(MatrixLayer):
    """y = x W^T + b; weight [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = self.new_parameter(out_features, in_features)
        self.bias = self.new_parameter(out_features) if bias else None

    def lora_shape(self) -> LoraShape:
        return LoraShape(self.in_features, (self.out_features,))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._adapted(hidden, self.dense.linear(hidden, self.matrix, self.bias))

    def after_norm(self, norm: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        """This linear of the norm: [T, in_features] to [T, out_features]."""
        if self.adapter_rows is not None:
            return self.forward(norm(hidden))  # adapters read the norm too
        return self.dense.norm_linear(hidden, norm.weight, norm.eps, self.matrix, self.bias)

    def added_to(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """residual + this linear of hidden, [T, out_features], in place of the residual."""
        output = self.dense.linear_add(hidden, self.matrix, self.bias, residual)
        return self._adapted(hidden, output)

    def _adapted(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The output with what the rows' adapters add to it, in place."""
        if self.adapters is not None and (rows := self.adapters.active.rows) is not None:
            self.adapters.table.add(hidden, output, rows)
        return output


class PackedLinear(Linear):
    """Several linears of one input as one: a checkpoint holds the parts, as siblings of this."""

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def adapted_parts(self, path: str) -> dict[str, int]:
        parent = path.rpartition(".")[0]
        return {f"{parent}.{part}": size for part, size in self.parts.items()}

    def lora_shape(self) -> LoraShape:
        return LoraShape(self.in_features, tuple(self.parts.values()))

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        parent = path.rpartition(".")[0]
        start = 0
        for part, size in self.parts.items():
            for name, parameter in self.named_parameters(recurse=False):
                yield f"{parent}.{part}.{name}", parameter[start : start + size]
            start += size


class GateUpLinear(PackedLinear):
    """The two linears of a gated feed-forward layer, the gate first."""

    def __init__(self, in_features: int, size: int, bias: bool = False) -> None:
        super().__init__(in_features, {"gate_proj": size, "up_proj": size}, bias)

    def swiglu_after_norm(self, norm: RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of the norm: [T, in_features] to [T, size]."""
        if self.adapter_rows is not None:
            return self.dense.silu_and_mul(self.after_norm(norm, hidden))
        return self.dense.norm_gate_up(hidden, norm.weight, norm.eps, self.matrix, self.bias)


class TransposedLinear(Linear):
    """GPT-2's Conv1D: a checkpoint holds [in_features, out_features]."""

    def checkpoint_tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter.t() if name == "weight" else parameter


class Embedding(MatrixLayer):
    """Rows of a table [num_embeddings, embedding_dim]."""

    is_embedding = True

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = self.new_parameter(num_embeddings, embedding_dim)

    def lora_shape(self) -> LoraShape:
        return LoraShape(self.num_embeddings, (self.embedding_dim,))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.dense.unpack_rows(self.matrix, ids)
        if self.adapters is not None and (rows := self.adapters.active.rows) is not None:
            self.adapters.table.add_embedded(ids, output, rows)
        return output


class LMHead(MatrixLayer):
    """Hidden states to logits, by a weight of its own or by the input embedding's."""

    def __init__(self, hidden_size: int, vocab_size: int, tied_to: Embedding | None) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        # In a list, so that the embedding does not become a submodule here.
        self._tied_to = [tied_to] if tied_to is not None else []
        if tied_to is None:
            self.weight = self.new_parameter(vocab_size, hidden_size)

    def lora_shape(self) -> LoraShape:
        return LoraShape(self.hidden_size, (self.vocab_size,))

    @property
    def tied(self) -> bool:
        """Whether the input embedding serves."""
        return bool(self._tied_to)

    def use_kernels(self, dense: DenseBackend) -> None:
        if self.tied:
            self.dense = dense
        else:
            super().use_kernels(dense)

    def forward(self, hidden: torch.Tensor, rows: LoraRows | None = None) -> torch.Tensor:
        """[R, hidden_size] to logits [R, vocab_size]: fp32, or of the model's dtype on a GPU.

        Args:
            hidden: rows that somebody samples from.
            rows: their adapters.
        """
        matrix = self._tied_to[0].matrix if self.tied else self.matrix
        logits = self.dense.logits(hidden, matrix)
        if self.adapters is not None and rows is not None:
            self.adapters.table.add(hidden, logits, rows)
        return logits


class RMSNorm(Layer):
    """Root mean square norm over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = self.new_parameter(size)
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense.rms_norm(hidden, self.weight, self.eps)


class LayerNorm(Layer):
    """Layer norm (arXiv:1607.06450) with or without weight and bias."""

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = self.new_parameter(size) if affine else None
        self.bias = self.new_parameter(size) if affine else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden, self.shape, self.weight, self.bias, self.eps)


class EncoderAttention(nn.Module):
    """Attention of every token to all of its sequence. A sequence at a time, so that its result
    depends on no other."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """Attends.

        Args:
            query: [T, num_heads, head_dim].
            key: the same.
            value: the same.
            lengths: of the sequences; they add up to T.

        Returns:
            [T, num_heads * head_dim].
        """
        heads = [torch.split(tensor.transpose(0, 1), lengths, 1) for tensor in (query, key, value)]
        attended = [
            F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            for q, k, v in zip(*heads, strict=True)
        ]
        return torch.cat(attended, 1).transpose(0, 1).flatten(1)


class PagedAttention(nn.Module):
    """Writes a layer's keys and values to the cache and attends through the block tables."""

    def __init__(self, layer_index: int, scale: float, sliding_window: int | None = None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.scale = scale
        self.sliding_window = sliding_window

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Writes and attends.

        Args:
            query: [T, num_heads, head_dim].
            key: [T, num_kv_heads, head_dim].
            value: the same.
            context: the step's.
            rotation: what query and key are to be turned by on their way; they may be overwritten.

        Returns:
            [T, num_heads * head_dim].
        """
        key_cache = context.key_caches[self.layer_index]
        value_cache = context.value_caches[self.layer_index]
        metadata, backend = context.metadata, context.backend
        caches = (key_cache, value_cache, metadata.slot_mapping)
        if rotation is None:
            backend.write_kv(key, value, *caches)
        else:
            angles = (rotation.positions, rotation.cos, rotation.sin)
            query = backend.rotate_and_write(query, key, value, *angles, *caches)
        attended = backend.paged_attention(
            query, key_cache, value_cache, metadata, self.scale, self.sliding_window
        )
        return attended.flatten(1)
