"""config.json of BERT without transformers, whose import takes most of an encoder's start.

As in `llama_config.py`: what is usual is read here, and all else left to transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "type_vocab_size",
)
_DTYPES = (None, "float32", "bfloat16", "float16")


class BertConfig(SimpleNamespace):
    """The fields of a Hugging Face config that our model reads, under the same names."""


def usual_bert_config(fields: dict[str, Any]) -> BertConfig | None:
    """The config, if nothing in it is unusual.

    Args:
        fields: of config.json.

    Returns:
        None where transformers has to be asked: a size is not stated, a value is of another type
        than it should be, or it is no plain encoder.
    """
    sizes = {name: fields.get(name) for name in _SIZES}
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return None
    if fields.get("position_embedding_type", "absolute") != "absolute":
        return None
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        return None
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    eps, activation = fields.get("layer_norm_eps", 1e-12), fields.get("hidden_act", "gelu")
    problem, labels = fields.get("problem_type"), _labels(fields)
    if dtype not in _DTYPES or labels is None or not isinstance(problem, str | None):
        return None
    if type(eps) is not float or not isinstance(activation, str):
        return None
    return BertConfig(
        model_type="bert",
        **sizes,
        hidden_act=activation,
        layer_norm_eps=eps,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        id2label=labels,
        num_labels=len(labels),
        problem_type=problem,
        dtype=dtype,
    )


def _labels(fields: dict[str, Any]) -> dict[int, str] | None:
    """Names of the classes by number, without a gap; two without a name where nothing is said."""
    given = fields.get("id2label")
    if given is None:
        count = fields.get("num_labels", 2)
        if type(count) is not int or not 1 <= count <= 10_000:
            return None
        return {index: f"LABEL_{index}" for index in range(count)}
    if not isinstance(given, dict) or not given:
        return None
    named = {index: given.get(str(index)) for index in range(len(given))}
    found = {index: name for index, name in named.items() if isinstance(name, str)}
    return found if len(found) == len(given) else None
