"""Decoder layers as one operation: what a backend that fuses them is given, and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagewire_kernels.attention import AttentionMetadata
from pagewire_kernels.lora import LoraRows, LoraTable


@dataclass(frozen=True)
class DecoderShape:
    """What all layers have in common.

    Attributes:
        hidden_size, num_heads, num_kv_heads, head_dim: sizes.
        eps: of the norms.
        scale: factor on query-key products.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True)
class DecoderAdapters:
    """The tables of adapters of a layer's linears."""

    qkv: LoraTable
    output: LoraTable
    gate_up: LoraTable
    down: LoraTable


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's weights; vectors are fp32 and contiguous.

    Attributes:
        input_norm, post_norm: fp32 [hidden_size], before attention and feed-forward.
        query_norm, key_norm: fp32 [head_dim] of each head, or None.
        qkv, output, gate_up, down: as `pack` returned them.
        qkv_bias, output_bias, gate_up_bias, down_bias: fp32, or None.
        sliding_window: None: every key is visible.
        adapters: None where no adapter can be loaded.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: Any
    output: Any
    gate_up: Any
    down: Any
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    sliding_window: int | None
    adapters: DecoderAdapters | None = None


class Decoder(Protocol):
    """Several decoder layers as one operation, cache writes and attention among them.

    Attributes:
        attention: the name of the attention backend whose work it does.
    """

    attention: str

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: AttentionMetadata,
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        adapter_rows: LoraRows | None = None,
    ) -> torch.Tensor:
        """Takes a step's tokens through all layers, and writes their keys and values.

        Args:
            hidden: [T, hidden_size], contiguous; overwritten with the result.
            cos: [T, 1, head_dim], as ops.rotate takes it.
            sin: [T, 1, head_dim / 2].
            metadata: the step's batch.
            key_caches: one [num_blocks, block_size, num_kv_heads, head_dim] a layer.
            value_caches: the same.
            adapter_rows: the adapter of each token; None: no token has one.

        Returns:
            `hidden`.
        """
        ...
