"""A GGUF file's metadata as a Hugging Face config, and its tensors' names as theirs.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagewire_engine.gguf_metadata import GGUFHead
from pagewire_engine.models.errors import ModelFileError, UnsupportedModelError

# general.architecture -> Hugging Face architecture. llama.cpp calls Mistral llama.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class GGUFConfig(SimpleNamespace):
    """The fields of a Hugging Face config that our models read, under the same names.

    Not transformers' own class: importing it takes longer (3 s and 80 MB) than all else that a
    small GGUF needs to start.
    """

    def standardize_rope_params(self) -> None:
        """transformers' rope functions call this on a config; the fields are standard already."""


_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_ROOT_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3's rope scaling, one divisor a frequency: read into the config, not into the model.
ROPE_DIVISORS = "rope_freqs.weight"


def hf_tensor_name(name: str) -> str:
    """Hugging Face's name for a llama.cpp tensor name; unknown names come back as they are."""
    if name in _ROOT_NAMES:
        return _ROOT_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def permutes_heads(metadata: dict[str, Any], hf_name: str) -> bool:
    """Whether the converter interleaved this tensor's rows, head by head.

    llama.cpp rotates neighbouring pairs in the llama architecture (others: i with i + D/2), and
    stores query and key rows in that order.
    """
    is_query_or_key = hf_name.split(".")[-2] in ("q_proj", "k_proj")
    return metadata["general.architecture"] == "llama" and is_query_or_key


def gguf_architecture(metadata: dict[str, Any], source: str) -> str:
    """Hugging Face's architecture name.

    Raises:
        UnsupportedModelError: the file holds another kind of model.
    """
    name = metadata.get("general.architecture")
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{source} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    if name not in _ARCHITECTURES or metadata.get(f"{name}.expert_count", 0) > 0:
        raise UnsupportedModelError(
            f"{source}: GGUF architecture {name!r} is not supported (nor are mixtures of experts); "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def gguf_end_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of sequence, of turn and of message: llama.cpp ends generation at any of them."""
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def config_from_gguf(head: GGUFHead, source: str) -> GGUFConfig:
    """The config of a model whose architecture is supported.

    Raises:
        ModelFileError: a key that every such model has is missing.
    """
    metadata = head.metadata
    model_type = metadata["general.architecture"]
    prefix = model_type + "."
    shapes = {tensor.name: tensor.shape for tensor in head.tensors}
    try:
        heads = metadata[prefix + "attention.head_count"]
        hidden_size = metadata[prefix + "embedding_length"]
        return GGUFConfig(
            model_type=model_type,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=metadata[prefix + "feed_forward_length"],
            num_hidden_layers=metadata[prefix + "block_count"],
            num_attention_heads=heads,
            num_key_value_heads=metadata.get(prefix + "attention.head_count_kv", heads),
            head_dim=metadata.get(prefix + "attention.key_length", hidden_size // heads),
            hidden_act="silu",
            rms_norm_eps=metadata[prefix + "attention.layer_norm_rms_epsilon"],
            max_position_embeddings=metadata[prefix + "context_length"],
            tie_word_embeddings="output.weight" not in shapes,
            attention_bias="blk.0.attn_output.bias" in shapes,
            rope_parameters=_rope_parameters(metadata, prefix),
            rope_frequency_divisors=None,
            dtype=None,
        )
    except KeyError as error:
        raise ModelFileError(f"{source} lacks {error}; download or convert it again") from error


def _rope_parameters(metadata: dict[str, Any], prefix: str) -> dict[str, Any]:
    scaling = prefix + "rope.scaling."
    kind = metadata.get(scaling + "type", "none")
    parameters: dict[str, Any] = {
        "rope_theta": metadata.get(prefix + "rope.freq_base", 10000.0),
        "rope_type": "default" if kind == "none" else kind,
    }
    if kind != "none":
        parameters["factor"] = metadata.get(scaling + "factor", 1.0)
    if kind in ("yarn", "longrope"):
        parameters["original_max_position_embeddings"] = metadata.get(
            scaling + "original_context_length", metadata[prefix + "context_length"]
        )
    return parameters
