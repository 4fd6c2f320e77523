"""PEFT's adapter_config.json: what of it changes numbers is understood here, or refused.

https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire_engine.adapters.errors import AdapterFileError, UnsupportedAdapterError

# Settings that change the model beyond pairs of matrices, and what they are. Each must be unset.
_NOT_SERVED = {
    "use_dora": "DoRA rescales whole weights",
    "lora_bias": "biases beside lora_B",
    "modules_to_save": "modules that were trained in full",
    "trainable_token_indices": "tokens that were trained in full",
    "target_parameters": "pairs for parameters that are no module's weight",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "an activated LoRA, which begins in the midst of a prompt",
    "use_qalora": "QALoRA pools inputs",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "a router over adapters",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "ensure_weight_tying": "one pair for the tied embeddings",
}
# Initialisations that leave the base model's weights as they are.
_KEEPING_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
# Patterns come from files of strangers: nothing that could take a matcher for ever.
_MOST_PATTERNS = 1024
_MOST_PATTERN_LENGTH = 256
_MOST_QUANTIFIERS = 3
_QUANTIFIERS = re.compile(r"[*+?{]")
_NESTED = re.compile(r"\)[*+?{]")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What a LoRA's config says of its numbers.

    Attributes:
        rank, alpha: of modules that no pattern matches.
        use_rslora: scale by alpha / sqrt(rank) (arXiv:2312.03732), not alpha / rank.
        rank_pattern, alpha_pattern: by pattern for the end of a module's name.
        base_model: the model it was trained on, as the config names it.
        target_modules: as the config has them, for messages.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str = ""
    target_modules: str = ""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> PeftConfig:
        """Reads the fields of adapter_config.json.

        Raises:
            UnsupportedAdapterError: it asks for more than pairs of matrices.
            AdapterFileError: a field makes no sense.
        """
        kind = config.get("peft_type")
        if kind != "LORA":
            raise UnsupportedAdapterError(
                f"adapter_config.json has peft_type {kind!r}: only LORA is served"
            )
        _refuse_what_is_not_served(config)
        return cls(
            rank=_rank("r", config.get("r")),
            alpha=_alpha("lora_alpha", config.get("lora_alpha")),
            use_rslora=config.get("use_rslora") is True,
            rank_pattern={
                key: _rank(f"rank_pattern[{key}]", value)
                for key, value in _patterns(config, "rank_pattern").items()
            },
            alpha_pattern={
                key: _alpha(f"alpha_pattern[{key}]", value)
                for key, value in _patterns(config, "alpha_pattern").items()
            },
            base_model=str(config.get("base_model_name_or_path") or ""),
            target_modules=_shown(config.get("target_modules")),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its full name."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor on a module's product."""
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _refuse_what_is_not_served(config: Mapping[str, Any]) -> None:
    for name, what in _NOT_SERVED.items():
        if config.get(name):
            raise UnsupportedAdapterError(
                f"adapter_config.json sets {name} ({what}), which is not served; merge the adapter "
                "into its model by PEFT's merge_and_unload(), and serve that"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedAdapterError(
            f"adapter_config.json has bias {config['bias']!r}: biases of the base model that were "
            "trained are not served; train with bias='none'"
        )
    initial = config.get("init_lora_weights", True)
    if initial not in _KEEPING_THE_BASE:
        raise UnsupportedAdapterError(
            f"adapter_config.json has init_lora_weights {initial!r}, which changes the base "
            "model's weights too; convert the adapter by PEFT's save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=...)"
        )


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterFileError(f"adapter_config.json: {name} must be a whole number above 0")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterFileError(f"adapter_config.json: {name} must be a number")
    return float(value)


def _patterns(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise AdapterFileError(
            f"adapter_config.json: {name} must be an object of at most {_MOST_PATTERNS} entries"
        )
    for pattern in patterns:
        wild = len(_QUANTIFIERS.findall(pattern)) > _MOST_QUANTIFIERS or _NESTED.search(pattern)
        if len(pattern) > _MOST_PATTERN_LENGTH or wild:
            raise AdapterFileError(
                f"adapter_config.json: {name} holds a pattern that is too long or too wild: "
                f"{pattern[:80]!r}; name the modules"
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise AdapterFileError(
                f"adapter_config.json: {name} holds {pattern[:80]!r}, which is no pattern"
            ) from error
    return patterns


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of a module's name, as PEFT looks for it."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), "")


def _shown(target_modules: Any) -> str:
    if isinstance(target_modules, list):
        return ", ".join(sorted(map(str, target_modules)))[:200]
    return str(target_modules or "")[:200]
