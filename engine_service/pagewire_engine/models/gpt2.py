"""GPT-2 (Radford et al. 2019): learned positions, layer norms before, weights stored transposed."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from pagewire_engine.models.activations import activation
from pagewire_engine.models.base import CausalLM, KVShape, token_head
from pagewire_engine.models.errors import UnsupportedModelError
from pagewire_engine.models.layers import (
    Embedding,
    ForwardContext,
    LayerNorm,
    PagedAttention,
    TransposedLinear,
)


class GPT2Attention(nn.Module):
    """Multi-head attention; one projection gives queries, keys and values."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = size // self.num_heads
        self.c_attn = TransposedLinear(size, 3 * size, bias=True)
        self.c_proj = TransposedLinear(size, size, bias=True)
        scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer_index + 1
        self.attention = PagedAttention(layer_index, scale)

    def forward(
        self, residual: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """residual + attention over hidden, in place of the residual."""
        qkv = self.c_attn(hidden).view(len(hidden), 3, self.num_heads, self.head_dim)
        attended = self.attention(*qkv.unbind(1), context)
        return self.c_proj.added_to(residual, attended)


class GPT2MLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        inner = config.n_inner if config.n_inner is not None else 4 * size
        self.c_fc = TransposedLinear(size, inner, bias=True)
        self.activation = activation(config.activation_function)
        self.c_proj = TransposedLinear(inner, size, bias=True)

    def forward(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """residual + feed-forward of hidden, in place of the residual."""
        return self.c_proj.added_to(residual, self.activation(self.c_fc(hidden)))


class GPT2Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_index)
        self.ln_2 = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.attn(hidden, self.ln_1(hidden), context)
        output: torch.Tensor = self.mlp(hidden, self.ln_2(hidden))
        return output


class GPT2Model(nn.Module):
    """The decoder without its head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(
            GPT2Block(config, index) for index in range(config.num_hidden_layers)
        )
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.wte(token_ids) + self.wpe(positions)
        for block in self.h:
            hidden = block(hidden, context)
        output: torch.Tensor = self.ln_f(context.wanted(hidden))
        return output


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its language model head."""

    base_prefix = "transformer."
    ignored_tensors = re.compile(r"(^|\.)attn\.(bias|masked_bias)$")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        if config.add_cross_attention:
            raise UnsupportedModelError("GPT-2 with cross-attention is not supported")
        self.transformer = GPT2Model(config)
        self.lm_head = token_head(config, self.input_embedding(), config.hidden_size)
        self.kv_shape = KVShape(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.hidden_size // config.num_attention_heads,
        )

    def input_embedding(self) -> Embedding:
        return self.transformer.wte

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.transformer(token_ids, positions, context)
        return hidden
