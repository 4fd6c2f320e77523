"""transformers' SmolLM2, with the weights of the embedded model's GGUF as the gguf package reads
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

from pagewire_engine.models.gguf_config import hf_tensor_name


def smollm2_reference(path: Path) -> Any:
    """LlamaForCausalLM in fp32.

    Args:
        path: the GGUF file.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    weights: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = hf_tensor_name(tensor.name)
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:
            heads = 9 if "q_proj" in name else 3
            values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
        weights[name] = values
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # What is computed from the config alone was made on "meta", too.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
