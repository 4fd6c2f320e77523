"""Which architectures are served, and by which class. Importing this loads no model code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire_engine.models.base import Model

# Hugging Face architecture -> (model_type of its config, module here, class here)
ARCHITECTURES: dict[str, tuple[str, str, str]] = {
    "LlamaForCausalLM": ("llama", "llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "llama", "LlamaForCausalLM"),
    "OPTForCausalLM": ("opt", "opt", "OPTForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "gpt2", "GPT2LMHeadModel"),
    "BertModel": ("bert", "bert", "BertEncoder"),
    "BertForMaskedLM": ("bert", "bert", "BertEncoder"),
    "BertForSequenceClassification": ("bert", "bert", "BertClassifier"),
}
# Their tokens see those behind them: they give vectors, and generate nothing.
ENCODERS = frozenset({"BertModel", "BertForMaskedLM"})
# Encoders with a head of classes.
CLASSIFIERS = frozenset({"BertForSequenceClassification"})


def model_class(architecture: str) -> type[Model]:
    """The class that serves a supported architecture."""
    _, module, name = ARCHITECTURES[architecture]
    found: type[Model] = getattr(importlib.import_module(f"pagewire_engine.models.{module}"), name)
    return found
