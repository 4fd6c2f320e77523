"""Random adapters for the tiny models, written by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

# Every linear layer of each kind of model.
ALL_LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
for _kin in ("mistral", "qwen2", "qwen3"):
    ALL_LINEARS[_kin] = ALL_LINEARS["llama"]
EMBEDDINGS = {"opt": "embed_tokens", "gpt2": "wte"}


def write_tiny_adapter(
    folder: Path, reference: Any, *, seed: int = 0, size: float = 0.2, **settings: Any
) -> Any:
    """Writes an adapter whose matrices are all random; returns PEFT's model with it.

    Args:
        folder: where to.
        reference: transformers' model; it stays as it is.
        seed: of the numbers.
        size: their standard deviation.
        settings: of peft.LoraConfig. Default: rank 4 for every linear layer.
    """
    from peft import LoraConfig, get_peft_model

    kind = reference.config.model_type
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL_LINEARS[kind],
        "fan_in_fan_out": kind == "gpt2",
    } | settings
    model = get_peft_model(copy.deepcopy(reference), LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    model.save_pretrained(str(folder))
    return model
