"""BERT (arXiv:1810.04805): an encoder with learned positions and norms after the residual sums."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from pagewire_engine.models.activations import activation
from pagewire_engine.models.base import Encoder, EncoderInputs
from pagewire_engine.models.errors import UnsupportedModelError
from pagewire_engine.models.layers import (
    Embedding,
    EncoderAttention,
    LayerNorm,
    Linear,
    PackedLinear,
)

_OLD_BUFFERS = r"(^|\.)embeddings\.position_ids$"


class BertEmbeddings(nn.Module):
    """Token, position and segment, added up and normed."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = Embedding(config.vocab_size, size)
        self.position_embeddings = Embedding(config.max_position_embeddings, size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, size)
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps)
        self.num_segments = int(config.type_vocab_size)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        # A model that can't tell the texts of a pair apart takes them as one.
        segments = inputs.segments.clamp(max=self.num_segments - 1)
        hidden = self.word_embeddings(inputs.token_ids) + self.token_type_embeddings(segments)
        output: torch.Tensor = self.LayerNorm(hidden + self.position_embeddings(inputs.positions))
        return output


class BertSelfAttention(nn.Module):
    """Queries, keys and values of one projection, and attention over them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        if size % self.num_heads:
            raise ValueError(f"hidden_size {size} is no multiple of {self.num_heads} heads")
        self.qkv = PackedLinear(size, {"query": size, "key": size, "value": size}, bias=True)
        self.attention = EncoderAttention((size // self.num_heads) ** -0.5)

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        qkv = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1)
        attended: torch.Tensor = self.attention(*qkv.unbind(1), lengths)
        return attended


class BertResidual(nn.Module):
    """A linear whose output is added to a residual and normed."""

    def __init__(self, in_features: int, config: Any) -> None:
        super().__init__()
        self.dense = Linear(in_features, config.hidden_size, bias=True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The residual is overwritten."""
        output: torch.Tensor = self.LayerNorm(self.dense.added_to(residual, hidden))
        return output


class BertAttention(nn.Module):
    """Self-attention with its output projection."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidual(config.hidden_size, config)

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        output: torch.Tensor = self.output(self.self(hidden, lengths), hidden)
        return output


class BertIntermediate(nn.Module):
    """The wide half of the feed-forward layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden))


class BertLayer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config.intermediate_size, config)

    def forward(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        hidden = self.attention(hidden, lengths)
        output: torch.Tensor = self.output(self.intermediate(hidden), hidden)
        return output


class BertLayers(nn.Module):
    """All of them, one after the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))


class BertPooler(nn.Module):
    """A dense layer over the first token's hidden state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(first))


class BertModel(nn.Module):
    """The encoder, with the pooler that heads of classes build on or without."""

    def __init__(self, config: Any, *, pools: bool) -> None:
        super().__init__()
        if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
            raise UnsupportedModelError("BERT with relative positions is not supported")
        if config.is_decoder or config.add_cross_attention:
            raise UnsupportedModelError("BERT as a decoder is not supported")
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertLayers(config)
        if pools:
            self.pooler = BertPooler(config)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        hidden: torch.Tensor = self.embeddings(inputs)
        for layer in self.encoder.layer:
            hidden = layer(hidden, inputs.lengths)
        return hidden


class BertEncoder(Encoder):
    """For embeddings. Heads that a checkpoint holds besides are left out."""

    base_prefix = "bert."
    ignored_tensors = re.compile(_OLD_BUFFERS + r"|^(bert\.)?pooler\.|^cls\.")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.bert = BertModel(config, pools=False)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(inputs)
        return hidden


class BertClassifier(Encoder):
    """BERT with a head of classes."""

    base_prefix = "bert."
    ignored_tensors = re.compile(_OLD_BUFFERS)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.bert = BertModel(config, pools=True)
        self.classifier = Linear(config.hidden_size, config.num_labels, bias=True)

    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(inputs)
        return hidden

    def classify(self, first: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.bert.pooler(first))
        return logits
