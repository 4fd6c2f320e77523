"""Writes a tiny transformers model as GGUF, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROOT = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_tiny_gguf(
    path: Path,
    model: Any,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Writes weights and metadata, with a vocabulary of single letters.

    Args:
        path: the file.
        model: a transformers model of type llama, qwen2 or qwen3 with default or llama3 rope.
        quantisation: of the matrices; vectors stay fp32.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_stored(name, tensor, config).numpy()
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            data = gguf.quantize(values, quantisation)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in _ROOT:
        return _ROOT[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(module)]}.{kind}"


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp's llama rotates neighbours: query and key rows are interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return tensor
    halves = tensor.reshape(heads[part], 2, tensor.shape[0] // heads[part] // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _llama3_divisors(config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return (plain / scaled).numpy().astype(np.float32)
