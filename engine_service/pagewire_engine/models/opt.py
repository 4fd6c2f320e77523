"""OPT (arXiv:2205.01068): learned positions, layer norms before or after, and biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagewire_engine.models.activations import activation
from pagewire_engine.models.base import CausalLM, KVShape, token_head
from pagewire_engine.models.layers import (
    Embedding,
    ForwardContext,
    LayerNorm,
    Linear,
    PackedLinear,
    PagedAttention,
)

# Row 0 of the position table was meant for padding, and fairseq's ids start after it.
_POSITION_OFFSET = 2


class OPTAttention(nn.Module):
    """Multi-head attention."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.enable_bias
        self.num_heads = config.num_attention_heads
        self.head_dim = size // self.num_heads
        self.qkv_proj = PackedLinear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias)
        self.out_proj = Linear(size, size, bias)
        self.attention = PagedAttention(layer_index, self.head_dim**-0.5)

    def forward(
        self, residual: torch.Tensor, hidden: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """residual + attention over hidden, in place of the residual."""
        qkv = self.qkv_proj(hidden).view(len(hidden), 3, self.num_heads, self.head_dim)
        attended = self.attention(*qkv.unbind(1), context)
        return self.out_proj.added_to(residual, attended)


class OPTDecoderLayer(nn.Module):
    """The 350M model norms after each half, the others before."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        size, affine = config.hidden_size, config.layer_norm_elementwise_affine
        self.norm_first = config.do_layer_norm_before
        self.self_attn = OPTAttention(config, layer_index)
        self.self_attn_layer_norm = LayerNorm(size, affine=affine)
        self.fc1 = Linear(size, config.ffn_dim, config.enable_bias)
        self.activation = activation(config.activation_function)
        self.fc2 = Linear(config.ffn_dim, size, config.enable_bias)
        self.final_layer_norm = LayerNorm(size, affine=affine)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        if self.norm_first:
            hidden = self.self_attn(hidden, self.self_attn_layer_norm(hidden), context)
            return self._feed_forward(hidden, self.final_layer_norm(hidden))
        hidden = self.self_attn_layer_norm(self.self_attn(hidden, hidden, context))
        output: torch.Tensor = self.final_layer_norm(self._feed_forward(hidden, hidden))
        return output

    def _feed_forward(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2.added_to(residual, self.activation(self.fc1(hidden)))


class OPTDecoder(nn.Module):
    """Embeddings (projected where their size is not the hidden one) and layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, embedding_size = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = Embedding(config.vocab_size, embedding_size)
        self.embed_positions = Embedding(config.max_position_embeddings + _POSITION_OFFSET, size)
        projects = embedding_size != size
        self.project_in = Linear(embedding_size, size) if projects else nn.Identity()
        self.project_out = Linear(size, embedding_size) if projects else nn.Identity()
        # Checkpoints tuned before transformers 4.20.1 have no last norm (metaseq pull 164).
        has_last_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        affine = config.layer_norm_elementwise_affine
        self.final_layer_norm = LayerNorm(size, affine=affine) if has_last_norm else nn.Identity()
        self.layers = nn.ModuleList(
            OPTDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.project_in(self.embed_tokens(token_ids))
        hidden = hidden + self.embed_positions(positions + _POSITION_OFFSET)
        for layer in self.layers:
            hidden = layer(hidden, context)
        normed = self.final_layer_norm(context.wanted(hidden))
        output: torch.Tensor = self.project_out(normed)
        return output


class OPTModel(nn.Module):
    """The level of naming that checkpoints have between the head and the decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config)


class OPTForCausalLM(CausalLM):
    """OPT with its language model head."""

    base_prefix = "model."

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.model = OPTModel(config)
        self.lm_head = token_head(config, self.input_embedding(), config.word_embed_proj_dim)
        self.kv_shape = KVShape(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.hidden_size // config.num_attention_heads,
        )

    def input_embedding(self) -> Embedding:
        return self.model.decoder.embed_tokens

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model.decoder(token_ids, positions, context)
        return hidden
