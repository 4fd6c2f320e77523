"""Filling a model's parameters: safetensors, GGUF, or seeded random numbers."""

from pagewire_engine.models.weight_loading.loader import load_model

__all__ = ["load_model"]
