"""Where a model's files are, and what they say of it. Weights are not read here."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire.sampling_params import SamplingParams
from pagewire_engine.gguf_metadata import read_gguf_head
from pagewire_engine.json_files import read_json_object
from pagewire_engine.model_hub import download_model
from pagewire_engine.models.bert_config import usual_bert_config
from pagewire_engine.models.errors import (
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    building_from,
)
from pagewire_engine.models.gguf_config import (
    config_from_gguf,
    gguf_architecture,
    gguf_end_token_ids,
)
from pagewire_engine.models.llama_config import LLAMA_TYPES, usual_config
from pagewire_engine.models.registry import ARCHITECTURES
from pagewire_engine.pooler_config import PoolerConfig, pooler_config

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 10_000
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        path: its folder.
        gguf: its GGUF file, if its weights come from one.
        name: what clients call it, unless told otherwise.
    """

    path: Path
    gguf: Path | None
    name: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the engine must know of a model before it is loaded.

    Attributes:
        hf_config: transformers' config object, or a LlamaConfig, BertConfig or GGUFConfig with
            the same fields.
        architecture: Hugging Face's class name, such as LlamaForCausalLM.
        eos_token_ids: ids that end a sequence.
        default_sampling_params: SamplingParams() with the model's own recommendations.
        max_model_len: the longest sequence it was made for, or less where the settings say so.
        vocab_size: rows of the output embedding.
        pooler: set where it gives vectors, and generates nothing.
    """

    hf_config: Any
    architecture: str
    eos_token_ids: tuple[int, ...]
    default_sampling_params: SamplingParams
    max_model_len: int
    vocab_size: int
    pooler: PoolerConfig | None = None


def resolve_model(config: EngineConfig, *, weights: bool = True) -> ModelFiles:
    """Finds the model's files, downloading them from a hub if need be.

    A tokenizer's are found in the same way, so weights need not be among them.

    Args:
        config: names the model.
        weights: False fetches from a hub only what a tokenizer needs.

    Raises:
        ModelNotFoundError: nothing has this name.
        ModelFileError: the path is a file, but no GGUF, or the hub holds several GGUF files.
        UnavailableError: the hub can't be reached.
        InvalidArgumentError: a setting that is refused.
    """
    if config.trust_remote_code:
        raise InvalidArgumentError(
            "trust_remote_code",
            "pagewire runs no code that comes with a model; leave it off and use a supported "
            f"architecture ({', '.join(ARCHITECTURES)})",
        )
    try:
        path = Path(config.model).expanduser()
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(
            f"{config.model[:100]!r} is no path ({error})", field="model"
        ) from error
    if is_file:
        return _single_file(path)
    if is_dir:
        name = config.model if _HUB_NAME.fullmatch(config.model) else path.resolve().name
        return _in_folder(path, name, config.load_format)
    if not _HUB_NAME.fullmatch(config.model):
        raise ModelNotFoundError(
            f"there is no file or folder {config.model!r}; give a model folder, a .gguf file, or "
            "a hub name such as org/name",
            field="model",
        )
    return _in_folder(download_model(config, weights=weights), config.model, config.load_format)


def load_description(files: ModelFiles, config: EngineConfig) -> ModelDescription:
    """Reads config.json (or the GGUF's metadata) and generation_config.json.

    Raises:
        ModelFileError: a file is missing or does not make sense, or there are no weights of the
            format asked for.
        UnsupportedModelError: the architecture or quantisation is not served here.
        InvalidArgumentError: max_model_len is above what the model can do.
    """
    _check_weights(files, config.load_format)
    with building_from(str(files.gguf or files.path)):
        return _describe(files, config)


def _describe(files: ModelFiles, config: EngineConfig) -> ModelDescription:
    if files.gguf is not None:
        architecture, hf_config, eos_token_ids = _read_gguf(files.gguf)
    else:
        architecture, hf_config, eos_token_ids = _read_config(files.path)
    _check_sizes(hf_config)
    generation = read_json_object(files.path / "generation_config.json", required=False)
    if generation.get("eos_token_id") is not None:
        eos_token_ids = _as_ids(generation["eos_token_id"])
    vocab_size = int(hf_config.vocab_size)
    folder = files.path if files.gguf is None else None
    pooler = pooler_config(folder, hf_config, architecture, config)
    return ModelDescription(
        hf_config=hf_config,
        architecture=architecture,
        eos_token_ids=tuple(i for i in eos_token_ids if 0 <= i < vocab_size),
        default_sampling_params=_sampling_defaults(generation),
        max_model_len=_max_model_len(
            hf_config, config.max_model_len, None if pooler is None else pooler.longest
        ),
        vocab_size=vocab_size,
        pooler=pooler,
    )


def _check_sizes(hf_config: Any) -> None:
    """Before anything is made of them: absurd ones take the machine's memory first."""
    most = dict.fromkeys(_SIZES, _LARGEST_SIZE) | {"num_hidden_layers": _MOST_LAYERS}
    for name, limit in most.items():
        value = getattr(hf_config, name, None)
        if value is not None and not 1 <= value <= limit:
            raise ValueError(f"{name} is {value}")


def _single_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelFileError(
            f"{path} is not a .gguf file; for safetensors give the folder that holds config.json",
            field="model",
        )
    return ModelFiles(path.parent, path, path.stem)


def _in_folder(folder: Path, name: str, load_format: str) -> ModelFiles:
    ggufs = _ggufs_to_read(folder, load_format)
    return ModelFiles(folder, ggufs[0] if len(ggufs) == 1 else None, name)


def _ggufs_to_read(folder: Path, load_format: str) -> list[Path]:
    if load_format == "gguf" or (load_format == "auto" and not any(folder.glob("*.safetensors"))):
        return sorted(folder.glob("*.gguf"))
    return []


def _check_weights(files: ModelFiles, load_format: str) -> None:
    folder = files.path
    if files.gguf is not None or load_format == "dummy":
        return
    ggufs = _ggufs_to_read(folder, load_format)
    if ggufs or load_format == "gguf":
        found = ", ".join(path.name for path in ggufs) or "none"
        raise ModelFileError(
            f"{folder} must hold one .gguf file ({found} found); name the file itself",
            field="model",
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(_why_no_weights(folder), field="model")


def _why_no_weights(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return f"{folder} has no *.safetensors, but GGUF; leave out --load-format safetensors"
    # A hub's model with no file of ours leaves no folder.
    pickles = [path.name for path in sorted(folder.glob("*")) if path.suffix in _PICKLES]
    if pickles:
        return (
            f"{folder} has only pickle weights ({pickles[0]}), which can run code when read and "
            "are refused; convert them: transformers' save_pretrained writes safetensors"
        )
    if not (folder / "config.json").is_file():
        return f"{folder} holds no model (neither config.json nor *.gguf); give a model's folder"
    return (
        f"{folder} has no weights (*.safetensors or *.gguf); download the model again, or use "
        "--load-format dummy for random weights"
    )


def _read_config(folder: Path) -> tuple[str, Any, tuple[int, ...]]:
    fields = read_json_object(folder / "config.json", required=True)
    architecture = _architecture(fields, folder)
    if "quantization_config" in fields:
        method = (fields["quantization_config"] or {}).get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{folder} is quantised ({method}), which is not supported; use the unquantised "
            "checkpoint or a GGUF",
            field="model",
        )
    hf_config = _hf_config(architecture, fields, str(folder / "config.json"))
    eos = getattr(hf_config, "eos_token_id", None)
    return architecture, hf_config, _as_ids(eos) if eos is not None else ()


def _architecture(fields: dict[str, Any], folder: Path) -> str:
    named = fields.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return str(architecture)
    if not named:
        for architecture, (model_type, _, _) in ARCHITECTURES.items():
            if fields.get("model_type") == model_type:
                return architecture
    what = ", ".join(named) or f"model_type {fields.get('model_type')!r}"
    raise UnsupportedModelError(
        f"{folder}: {what} is not supported; supported are {', '.join(ARCHITECTURES)}",
        field="model",
    )


def _read_gguf(path: Path) -> tuple[str, Any, tuple[int, ...]]:
    head = read_gguf_head(path)
    architecture = gguf_architecture(head.metadata, str(path))
    hf_config = config_from_gguf(head, str(path))
    return architecture, hf_config, gguf_end_token_ids(head.metadata)


def _hf_config(architecture: str, fields: dict[str, Any], source: str) -> Any:
    """The config of a usual Llama-like model or BERT, or else the transformers config object, with
    its defaults and its checks.

    Raises:
        ModelFileError: transformers refuses the values.
    """
    model_type = ARCHITECTURES[architecture][0]
    if model_type in LLAMA_TYPES and (usual := usual_config(model_type, fields)) is not None:
        return usual
    if model_type == "bert" and (usual_bert := usual_bert_config(fields)) is not None:
        return usual_bert
    from transformers import AutoConfig

    rest = {name: value for name, value in fields.items() if name not in ("model_type", "auto_map")}
    try:
        return AutoConfig.for_model(model_type, **rest)
    except Exception as error:
        # Its strict dataclasses raise several unrelated types for a bad value.
        raise ModelFileError(
            f"{source} does not make a {architecture}: {error}", field="model"
        ) from error


def _as_ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _sampling_defaults(generation: dict[str, Any]) -> SamplingParams:
    """The model's recommendations; one that no request could ask for is left out."""
    defaults = SamplingParams()
    for name in _SAMPLING_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        try:
            defaults = replace(defaults, **{name: value})
        except InvalidArgumentError as error:
            logger.warning("generation_config.json is not followed: %s", error)
    return defaults


def _max_model_len(hf_config: Any, asked: int | None, recommended: int | None = None) -> int:
    longest = trained_context(hf_config)
    if asked is not None and asked > longest:
        raise InvalidArgumentError(
            "max_model_len",
            f"{asked} is above the model's {longest}; lower it, or set rope scaling in config.json",
        )
    if asked is not None:
        return asked
    return longest if recommended is None else min(longest, recommended)


def trained_context(hf_config: Any) -> int:
    """Positions the model can tell apart, rope scaling included.

    Linear and dynamic scaling stretch max_position_embeddings, yarn the length it names itself;
    llama3 and longrope configs state the stretched length.
    """
    longest = int(hf_config.max_position_embeddings)
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    factor = float(parameters.get("factor") or 1.0)
    if kind in ("linear", "dynamic"):
        return int(longest * factor)
    if kind == "yarn":
        return max(longest, int(parameters["original_max_position_embeddings"] * factor))
    return longest
