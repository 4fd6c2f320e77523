"""Tiny random models of every architecture, written as Hugging Face folders.

Each config is meant to break a server that ignores it: scaled rope, a window shorter than the
context, biases, heads whose size is not hidden / heads, tied and untied embeddings. Every
parameter is random, biases and norms too: what is 0 or 1 by default would hide that it is unused.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 320
MAX_POSITIONS = 128

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
_LLAMA = _SHARED | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (model_type, config fields)
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-rope-tied": (
        "llama",
        _LLAMA | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-biases-untied-odd-heads": (
        "llama",
        _LLAMA
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama-quantisable": (  # rows of whole blocks of 32
        "llama",
        _LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    ),
    "llama-linear-rope": (
        "llama",
        _LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "llama",
        _LLAMA
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn-rope": (
        "llama",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-longrope": (
        "llama",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": (
        "mistral",
        _LLAMA | {"sliding_window": 7, "head_dim": 16, "rope_parameters": {"rope_theta": 1e4}},
    ),
    "mistral-no-window": (
        "mistral",
        _LLAMA | {"sliding_window": None, "tie_word_embeddings": True},
    ),
    "qwen2-window-in-upper-layers": (
        "qwen2",
        _LLAMA | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-unused-window-tied": (
        "qwen2",
        _LLAMA | {"use_sliding_window": False, "sliding_window": 4, "tie_word_embeddings": True},
    ),
    "qwen3-head-norms-tied": (
        "qwen3",
        _LLAMA | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-head-norms-tied-without-bias": (
        "qwen3",
        _LLAMA | {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3-layer-types": (
        "qwen3",
        _LLAMA
        | {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "opt-norm-before": (
        "opt",
        _SHARED
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "word_embed_proj_dim": 48,
        },
    ),
    "opt-norm-after-projected": (
        "opt",
        _SHARED
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "activation_function": "gelu",
        },
    ),
    "opt-untied-without-biases": (
        "opt",
        _SHARED
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 48,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2-tied": (
        "gpt2",
        {k: v for k, v in _SHARED.items() if k != "max_position_embeddings"}
        | {"n_positions": MAX_POSITIONS, "n_embd": 48, "n_layer": 3, "n_head": 3},
    ),
    "gpt2-untied-layer-scaled": (
        "gpt2",
        {k: v for k, v in _SHARED.items() if k != "max_position_embeddings"}
        | {
            "n_positions": MAX_POSITIONS,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 80,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
        },
    ),
}


def tiny_reference(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model, fp32, with every parameter random; `changes` to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = TINY_MODELS[name]
    config = AutoConfig.for_model(model_type, **fields | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = "norm" in path or ".ln_" in path
            centre = 1.0 if is_norm and path.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + centre)
    return model


def write_tiny_model(folder: Path, name: str, seed: int = 0, **changes: Any) -> Any:
    """Writes safetensors, config and tokenizer to `folder`; returns the transformers model."""
    model = tiny_reference(name, seed, **changes)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return model


BERT_LABELS = ("no", "perhaps", "yes")


def write_tiny_bert(
    folder: Path, *, labels: tuple[str, ...] = (), tokenizer: bool = True, **fields: Any
) -> Any:
    """A random BERT, with a head of classes where there are labels; returns transformers' model."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    config = BertConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "max_position_embeddings": 64,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
        }
        | fields,
        **({"id2label": dict(enumerate(labels))} if labels else {}),
    )
    model = (BertForSequenceClassification if labels else BertModel)(config).float().eval()
    generator = torch.Generator().manual_seed(len(labels))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            centre = 1.0 if "LayerNorm.weight" in path else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + centre)
    model.save_pretrained(folder)
    if tokenizer:
        write_tiny_wordpiece(folder)
    return model


def write_tiny_wordpiece(folder: Path) -> None:
    """Letters and digits, whole and as the rest of a word, with BERT's control tokens 0 to 3."""
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = [*control, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(
        models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(control)
    # As MiniLM's comes: a server that heeds them cuts long texts in silence.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_sentence_transformers_files(
    folder: Path, mode: str = "mean_tokens", *, normalize: bool = True, max_seq_length: int = 32
) -> None:
    """What sentence-transformers writes beside a model."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    if normalize:
        kinds["Normalize"] = "2_Normalize"
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", mode)}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": max_seq_length})
    )


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes, then <s> (256) and </s> (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
        "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
