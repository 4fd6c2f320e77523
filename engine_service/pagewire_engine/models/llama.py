"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ in biases, norms and windows.

Llama 2 (arXiv:2307.09288), Mistral 7B (arXiv:2310.06825), Qwen2 (arXiv:2407.10671), Qwen3
(arXiv:2505.09388).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from pagewire_engine.models.activations import activation
from pagewire_engine.models.base import CausalLM, KVShape, token_head
from pagewire_engine.models.layers import (
    Embedding,
    ForwardContext,
    GateUpLinear,
    KernelUser,
    Linear,
    PackedLinear,
    PagedAttention,
    RMSNorm,
    Rotation,
)
from pagewire_engine.models.rotary import RotaryTable, head_dim_of
from pagewire_kernels.decoder import Decoder, DecoderAdapters, DecoderLayer, DecoderShape
from pagewire_kernels.dense import DenseBackend

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LlamaAttention(KernelUser):
    """Grouped-query attention with rotary positions; Qwen3 norms each head's query and key."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.head_dim = head_dim_of(config)
        bias = getattr(config, "attention_bias", False)
        query_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = PackedLinear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=bias or config.model_type == "qwen2",
        )
        self.o_proj = Linear(query_size, config.hidden_size, bias=bias)
        self.norms_heads = config.model_type == "qwen3"
        if self.norms_heads:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.is_last = layer_index == config.num_hidden_layers - 1
        self.attention = PagedAttention(
            layer_index, self.head_dim**-0.5, _sliding_window(config, layer_index)
        )

    def forward(
        self,
        residual: torch.Tensor,
        norm: RMSNorm,
        rotation: Rotation,
        context: ForwardContext,
    ) -> torch.Tensor:
        """residual + attention over its norm, in place of the residual; of the last layer only the
        wanted rows, for no other layer needs the rest."""
        qkv = self.qkv_proj.after_norm(norm, residual).view(len(residual), -1, self.head_dim)
        if context.backend.fuses_rotation:
            attended = self.attention(*self._heads(qkv), context, rotation)
        else:
            attended = self.attention(*self._rotated_heads(qkv, *rotation.angles), context)
        if self.is_last:
            residual, attended = context.wanted(residual), context.wanted(attended)
        return self.o_proj.added_to(residual, attended)

    def _heads(self, qkv: torch.Tensor) -> Heads:
        """Query, key and value of [T, all heads, head_dim], normed if this model norms them."""
        query, key, value = qkv.split_with_sizes(self.heads, 1)
        if self.norms_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def _rotated_heads(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
        """The same with query and key rotated, at once where they still lie side by side."""
        if self.norms_heads:
            query, key, value = self._heads(qkv)
            return self.dense.rotate(query, cos, sin), self.dense.rotate(key, cos, sin), value
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = self.dense.rotate(qkv[:, :num_rotated], cos, sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], qkv[:, num_rotated:]


class LlamaMLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        size = config.intermediate_size
        self.gate_up_proj = GateUpLinear(config.hidden_size, size, bias)
        self.down_proj = Linear(size, config.hidden_size, bias)
        self.is_silu = config.hidden_act in ("silu", "swish")
        self.activation = activation(config.hidden_act)

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """residual + feed-forward of its norm, in place of the residual."""
        if self.is_silu:
            product = self.gate_up_proj.swiglu_after_norm(norm, residual)
        else:
            gate, up = self.gate_up_proj.after_norm(norm, residual).chunk(2, dim=-1)
            product = self.activation(gate) * up
        return self.down_proj.added_to(residual, product)


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.self_attn(hidden, self.input_layernorm, rotation, context)
        output: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return output

    def weights(self) -> DecoderLayer:
        """What a fused layer computes with."""
        attention, mlp = self.self_attn, self.mlp
        return DecoderLayer(
            input_norm=self.input_layernorm.weight,
            post_norm=self.post_attention_layernorm.weight,
            query_norm=attention.q_norm.weight if attention.norms_heads else None,
            key_norm=attention.k_norm.weight if attention.norms_heads else None,
            qkv=attention.qkv_proj.matrix,
            output=attention.o_proj.matrix,
            gate_up=mlp.gate_up_proj.matrix,
            down=mlp.down_proj.matrix,
            qkv_bias=attention.qkv_proj.bias,
            output_bias=attention.o_proj.bias,
            gate_up_bias=mlp.gate_up_proj.bias,
            down_bias=mlp.down_proj.bias,
            sliding_window=attention.attention.sliding_window,
            adapters=self._adapters(),
        )

    def _adapters(self) -> DecoderAdapters | None:
        attention, mlp = self.self_attn, self.mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        adapters = [linear.adapters for linear in linears]
        tables = [each.table for each in adapters if each is not None]
        return DecoderAdapters(*tables) if tables else None


class LlamaModel(KernelUser):
    """The decoder without its head."""

    _fused: Decoder | None = None
    _may_be_fused: bool = False

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config, max_model_len, torch.get_default_dtype())

    def use_kernels(self, dense: DenseBackend) -> None:
        super().use_kernels(dense)
        # The layers take over the backend after this; they are fused when they are first needed.
        self._fused, self._may_be_fused = None, True

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(token_ids)
        rotation = self.rotary(positions)
        if self._may_be_fused:
            self._fused, self._may_be_fused = self._fuse(), False
        if self._fused is not None and self._fused.attention == context.backend.name:
            cos, sin = rotation.angles
            hidden = self._fused(
                hidden,
                cos,
                sin,
                context.metadata,
                context.key_caches,
                context.value_caches,
                self.embed_tokens.adapter_rows,
            )
            hidden = context.wanted(hidden)
        else:
            for layer in self.layers:
                hidden = layer(hidden, rotation, context)
        output: torch.Tensor = self.norm(hidden)
        return output

    def _fuse(self) -> Decoder | None:
        """All layers as one operation, if the backend has it and they are of its kind."""
        layers = [layer for layer in self.layers if isinstance(layer, LlamaDecoderLayer)]
        attention = layers[0].self_attn
        if not layers[0].mlp.is_silu:
            return None
        shape = DecoderShape(
            hidden_size=self.norm.weight.shape[0],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            eps=self.norm.eps,
            scale=attention.attention.scale,
        )
        return self.dense.decoder(shape, [layer.weights() for layer in layers])


class LlamaForCausalLM(CausalLM):
    """The whole family; the config's model_type tells the members apart."""

    base_prefix = "model."
    ignored_tensors = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.model = LlamaModel(config, max_model_len)
        self.lm_head = token_head(config, self.model.embed_tokens, config.hidden_size)
        self.kv_shape = KVShape(
            config.num_hidden_layers, config.num_key_value_heads, head_dim_of(config)
        )

    def input_embedding(self) -> Embedding:
        return self.model.embed_tokens

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model(token_ids, positions, context)
        return hidden


def _sliding_window(config: Any, layer_index: int) -> int | None:
    """Mistral's window is every layer's; Qwen's layer_types say whose it is."""
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or layer_types is None:
        return window if config.model_type == "mistral" else None
    return window if layer_types[layer_index] == "sliding_attention" else None
