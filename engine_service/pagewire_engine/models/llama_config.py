"""config.json of the Llama family without transformers, whose import takes longer than all else
that a GPU needs to start (11 s on a cold disk).

What is of the usual kind is read here, with transformers' defaults; whatever else a config may hold
is left to transformers, with all of its checks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

LLAMA_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
# Rare, and more to them than their value.
_LEFT_TO_TRANSFORMERS = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "per_layer_config",
)
_DTYPES = (None, "float32", "bfloat16", "float16")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class LlamaConfig(SimpleNamespace):
    """The fields of a Hugging Face config that our models read, under the same names."""


def usual_config(model_type: str, fields: dict[str, Any]) -> LlamaConfig | None:
    """The config, if nothing in it is unusual.

    Args:
        model_type: one of LLAMA_TYPES.
        fields: of config.json.

    Returns:
        None where transformers has to be asked: a size is not stated, a value is of another type
        than it should be, or something stands there that only few models have.
    """
    if any(name in fields for name in _LEFT_TO_TRANSFORMERS):
        return None
    rope = _rope_parameters(fields)
    sizes = _sizes(model_type, fields)
    window = _windows(model_type, fields)
    switches = {name: fields.get(name, False) for name in _SWITCHES}
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    eps, activation = fields.get("rms_norm_eps", 1e-6), fields.get("hidden_act", "silu")
    eos = fields.get("eos_token_id", 2 if model_type in ("llama", "mistral") else None)
    if rope is None or sizes is None or window is None or dtype not in _DTYPES:
        return None
    if not all(type(value) is bool for value in switches.values()):
        return None
    if not (_is_number(eps) and isinstance(activation, str) and _is_end(eos)):
        return None
    return LlamaConfig(
        model_type=model_type,
        **sizes,
        **window,
        **switches,
        hidden_act=activation,
        rms_norm_eps=eps,
        rope_parameters=rope,
        eos_token_id=eos,
        dtype=dtype,
    )


def _sizes(model_type: str, fields: dict[str, Any]) -> dict[str, int] | None:
    sizes = {name: fields.get(name) for name in _SIZES}
    heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    if type(heads) is not int or type(hidden_size) is not int or heads < 1 or hidden_size % heads:
        return None
    if sizes["num_key_value_heads"] is None and model_type == "llama":
        sizes["num_key_value_heads"] = heads
    if sizes["head_dim"] is None and model_type != "qwen3":
        sizes["head_dim"] = hidden_size // heads
    found = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
    return found if len(found) == len(sizes) and found["head_dim"] % 2 == 0 else None


def _windows(model_type: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """`sliding_window`, and for Qwen `layer_types`."""
    window, types = fields.get("sliding_window", 4096), fields.get("layer_types")
    if window is not None and type(window) is not int:
        return None
    if model_type in ("llama", "mistral"):
        if types is not None or (model_type == "llama" and "sliding_window" in fields):
            return None
        return {"sliding_window": window if model_type == "mistral" else None}
    layers, first = fields.get("num_hidden_layers"), fields.get("max_window_layers", 28)
    if type(layers) is not int or type(first) is not int or layers > 10_000:
        return None
    if not fields.get("use_sliding_window", False):
        window = None
    if types is None:
        slides = [window is not None and index >= first for index in range(layers)]
        types = [_LAYER_TYPES[each] for each in slides]
    if not isinstance(types, list) or len(types) != layers:
        return None
    if not all(each in _LAYER_TYPES for each in types):
        return None
    return {"sliding_window": window, "layer_types": types}


def _rope_parameters(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Of unscaled rotations and of Llama 3's: the others are computed by transformers as well."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return None
    rope = {"rope_theta": fields.get("rope_theta", 10_000.0)} | given
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if not _is_number(rope["rope_theta"]) or "partial_rotary_factor" in rope:
        return None
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
        return rope if all(_is_number(rope.get(key)) for key in _LLAMA3_KEYS) else None
    return rope if kind == "default" and set(rope) == {"rope_theta", "rope_type"} else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_end(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return value is None or all(type(each) is int for each in ids)
