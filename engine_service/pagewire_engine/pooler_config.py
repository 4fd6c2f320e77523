"""Whether a model pools, and how, by its architecture, its files and the settings.

What sentence-transformers writes beside a model says it best: modules.json lists the steps from
text to vector, 1_Pooling/config.json and 2_Normalize among them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire.pooling import PoolingInfo, Task
from pagewire_engine.json_files import read_json, read_json_object
from pagewire_engine.models.errors import ModelFileError, UnsupportedModelError
from pagewire_engine.models.registry import CLASSIFIERS, ENCODERS

logger = logging.getLogger(__name__)

PoolingType = Literal["cls", "mean", "last"]
Activation = Literal["none", "sigmoid", "softmax"]

_MODULES = "modules.json"
# sentence-transformers' names of the modes, and ours; it has more, and adds up those that are set.
_MODES: dict[str, PoolingType] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """How hidden states become a vector.

    Attributes:
        task: EMBED, or CLASSIFY for a model with a classification head.
        pooling_type: the first token's hidden state, the mean of all, or the last token's.
        normalize: whether embeddings get the length 1, unless a request says otherwise.
        activation: of a classification head's logits, unless a request wants those.
        default_activation: whether it is applied where a request does not say.
        is_encoder: tokens see those behind them: a prompt is computed in one step, and keeps no
            keys and values.
        longest: tokens it was trained for, where the files name fewer than its positions.
        info: what is told of it.
    """

    task: Task
    pooling_type: PoolingType
    normalize: bool
    activation: Activation
    default_activation: bool
    is_encoder: bool
    longest: int | None
    info: PoolingInfo

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What can be asked of the model. Any embeddings have cosines; of classes there must be
        one, and that is a cross-encoder's."""
        if self.task is Task.CLASSIFY and self.info.size > 1:
            return (self.task,)
        return (self.task, Task.SCORE)

    @property
    def needs_every_token(self) -> bool:
        """Whether a prompt's tokens must all be computed, cached or not."""
        return self.pooling_type == "mean"


def pooler_config(
    folder: Path | None, hf_config: Any, architecture: str, config: EngineConfig
) -> PoolerConfig | None:
    """None for a model that generates.

    Args:
        folder: the model's, unless its weights are a GGUF file.
        hf_config: its config.
        architecture: Hugging Face's class name.
        config: the settings; `runner`, `pooling_type` and `normalize_embeddings` are read.

    Raises:
        InvalidArgumentError: a setting that this model can't be served with.
        UnsupportedModelError: the files ask for a step that is not served.
        ModelFileError: a file can't be read.
    """
    is_encoder = architecture in ENCODERS or architecture in CLASSIFIERS
    has_modules = folder is not None and (folder / _MODULES).is_file()
    if config.runner == "generate" and is_encoder:
        raise InvalidArgumentError(
            "runner", f"{architecture} gives vectors and generates no text; leave it out"
        )
    if config.runner == "generate" or (
        config.runner == "auto" and not is_encoder and not has_modules
    ):
        _refuse_settings(config, "is for models that pool; leave it out, or set runner to pooling")
        return None
    if config.enable_lora:
        raise InvalidArgumentError(
            "enable_lora", "adapters are for models that generate, and this one pools; leave it out"
        )
    fields = {} if folder is None else read_json_object(folder / "config.json", required=False)
    if architecture in CLASSIFIERS:
        _refuse_settings(config, f"is for embeddings, and {architecture} classifies; leave it out")
        return _classifier(hf_config, fields, architecture)
    steps = _read_modules(folder) if folder is not None and has_modules else _Modules()
    pooling_type = config.pooling_type or steps.pooling_type(is_encoder)
    if pooling_type == "cls" and not is_encoder:
        raise InvalidArgumentError(
            "pooling_type",
            f"cls takes the first token, which in {architecture} sees no other; use last or mean",
        )
    normalize = steps.normalizes
    if config.normalize_embeddings is not None:
        normalize = config.normalize_embeddings
    return PoolerConfig(
        task=Task.EMBED,
        pooling_type=pooling_type,
        normalize=normalize,
        activation="none",
        default_activation=False,
        is_encoder=is_encoder,
        longest=steps.longest,
        info=PoolingInfo(
            int(hf_config.hidden_size),
            dimensions=_matryoshka_dimensions(fields, int(hf_config.hidden_size)),
            any_dimensions=bool(fields.get("is_matryoshka")),
        ),
    )


def _refuse_settings(config: EngineConfig, why: str) -> None:
    for name in ("pooling_type", "normalize_embeddings"):
        if getattr(config, name) is not None:
            raise InvalidArgumentError(name, why)


def _matryoshka_dimensions(fields: dict[str, Any], size: int) -> tuple[int, ...]:
    given = fields.get("matryoshka_dimensions") or ()
    return tuple(sorted(int(one) for one in given if 1 <= int(one) < size))


def _classifier(hf_config: Any, fields: dict[str, Any], architecture: str) -> PoolerConfig:
    names = hf_config.id2label
    labels = tuple(str(names[index]) for index in sorted(names))
    several = getattr(hf_config, "problem_type", None) == "multi_label_classification"
    return PoolerConfig(
        task=Task.CLASSIFY,
        pooling_type="cls",
        normalize=False,
        activation="sigmoid" if several or len(labels) == 1 else "softmax",
        default_activation=_applies_activation(fields, architecture),
        is_encoder=True,
        longest=None,
        info=PoolingInfo(len(labels), labels=labels),
    )


def _applies_activation(fields: dict[str, Any], architecture: str) -> bool:
    """Cross-encoders of sentence-transformers name a function, and regression has none."""
    named = (fields.get("sentence_transformers") or {}).get("activation_fn")
    named = named or fields.get("sbert_ce_default_activation_function")
    if named is None:
        return fields.get("problem_type") != "regression"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Identity", "Sigmoid"):
        raise UnsupportedModelError(
            f"the activation {named} of this {architecture} is not supported; Identity and Sigmoid "
            "are",
            field="model",
        )
    return kind == "Sigmoid"


@dataclass(frozen=True, slots=True)
class _Modules:
    """What sentence-transformers' files say.

    Attributes:
        modes: names of the pooling modes that are set; None where nothing is said.
        normalizes: see PoolerConfig. Where no files say anything: as OpenAI's embeddings are.
        longest: see PoolerConfig.
        source: the file that names the modes.
    """

    modes: tuple[str, ...] | None = None
    normalizes: bool = True
    longest: int | None = None
    source: str = ""

    def pooling_type(self, is_encoder: bool) -> PoolingType:
        """Where nothing is said, what sentence-transformers makes of an encoder, and for a causal
        model the one token that has seen all others.

        Raises:
            UnsupportedModelError: a mode that is not served.
        """
        if self.modes is None:
            return "mean" if is_encoder else "last"
        if len(self.modes) != 1 or self.modes[0] not in _MODES:
            named = " and ".join(self.modes) or "nothing"
            raise UnsupportedModelError(
                f"{self.source} asks for pooling by {named}, and supported is one of "
                f"{', '.join(_MODES)}; set pooling_type for another than the file's",
                field="model",
            )
        return _MODES[self.modes[0]]


def _read_modules(folder: Path) -> _Modules:
    """Raises ModelFileError or UnsupportedModelError."""
    path = folder / _MODULES
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ModelFileError(f"{path} does not hold a list of objects", field="model")
    modes: tuple[str, ...] | None = None
    source, normalizes = str(path), False
    for one in listed:
        kind = str(one.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config_path = folder / str(one.get("path", "")) / "config.json"
            modes, source = _modes(config_path), str(config_path)
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"{path} has a step {kind!r}, which is not supported; supported are Transformer, "
                "Pooling and Normalize",
                field="model",
            )
    prompts = read_json_object(folder / "config_sentence_transformers.json", required=False)
    if prompts.get("default_prompt_name"):
        logger.warning(
            "sentence-transformers would put the prompt %r before each text; texts are taken as "
            "they are: send them with it",
            prompts["default_prompt_name"],
        )
    sizes = read_json_object(folder / "sentence_bert_config.json", required=False)
    longest = sizes.get("max_seq_length")
    return _Modules(modes, normalizes, int(longest) if longest else None, source)


def _modes(path: Path) -> tuple[str, ...]:
    fields = read_json_object(path, required=True)
    prefix = "pooling_mode_"
    named = fields.get("pooling_mode")
    if named is not None:
        listed = named if isinstance(named, list) else [named]
        ours: dict[str, str] = {kind: mode for mode, kind in _MODES.items()}
        return tuple(ours.get(one, one) for one in map(str, listed))
    return tuple(
        name.removeprefix(prefix) for name, on in fields.items() if name.startswith(prefix) and on
    )
