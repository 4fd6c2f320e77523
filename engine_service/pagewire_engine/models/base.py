"""What every model offers to the worker and the weight loader."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from pagewire_engine.models.layers import Embedding, ForwardContext, KernelUser, Layer, LMHead
from pagewire_kernels.dense import DenseBackend
from pagewire_kernels.lora import LoraRows


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys (or values) of one token: num_layers x num_kv_heads x head_dim numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Model(nn.Module, ABC):
    """What is loaded from a checkpoint.

    Attributes:
        base_prefix: what checkpoints of the bare model leave out of their names.
        ignored_tensors: names that checkpoints hold and this model does not need.
    """

    base_prefix: ClassVar[str]
    ignored_tensors: ClassVar[re.Pattern[str]] = re.compile(r"$^")

    def use_kernels(self, dense: DenseBackend) -> None:
        """Computes with this backend from now on; after loading, since it may pack weights."""
        for module in self.modules():
            if isinstance(module, KernelUser):
                module.use_kernels(dense)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor a checkpoint must hold, by Hugging Face name, and where it goes."""
        places: dict[str, torch.Tensor] = {}
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                places.update(module.checkpoint_tensors(path))
        return places


class CausalLM(Model):
    """A decoder with a language model head.

    Attributes:
        lm_head: hidden states to logits.
        kv_shape: what the cache must hold.
    """

    lm_head: LMHead
    kv_shape: KVShape

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """int64 [T] ids and positions to hidden states as the head takes them, [T, hidden] or of
        the rows that the context wants."""

    @abstractmethod
    def input_embedding(self) -> Embedding:
        """The token embedding, which a tied head shares."""

    def compute_logits(
        self, hidden: torch.Tensor, adapter_rows: LoraRows | None = None
    ) -> torch.Tensor:
        """[R, hidden] to [R, vocab_size]: fp32, or of the model's dtype on a GPU.

        Args:
            hidden: R rows.
            adapter_rows: their adapters; None: no row has one.
        """
        logits: torch.Tensor = self.lm_head(hidden, adapter_rows)
        return logits


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Whole sequences, packed one after the other: T tokens.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], from 0 in each sequence.
        segments: int64 [T], 0, and 1 in the second text of a pair.
        lengths: of the sequences; they add up to T.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    lengths: list[int]


class Encoder(Model):
    """A model whose tokens see all others of their sequence."""

    @abstractmethod
    def forward(self, inputs: EncoderInputs) -> torch.Tensor:
        """Hidden states [T, hidden]."""

    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, hidden] of first tokens to logits [R, classes].

        Raises:
            TypeError: the model has no head of classes.
        """
        raise TypeError(f"{type(self).__name__} has no head of classes")


@contextmanager
def construction(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New parameters get this dtype and device, without every layer passing them on."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)


def token_head(config: Any, embedding: Embedding, size: int) -> LMHead:
    """The head over `size` features that the config's tie_word_embeddings asks for."""
    return LMHead(size, config.vocab_size, embedding if config.tie_word_embeddings else None)
