"""Reads an adapter's weights, and holds them against the model they are for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pagewire_engine.adapters.description import AdapterDescription, AdapterFolder
from pagewire_engine.adapters.errors import AdapterFileError, UnsupportedAdapterError
from pagewire_engine.adapters.files import read_config, weights_file
from pagewire_engine.adapters.peft_config import PeftConfig
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.errors import ModelFileError
from pagewire_engine.models.layers import Embedding, LMHead, MatrixLayer
from pagewire_engine.models.weight_loading.safetensors_source import SafetensorsSource
from pagewire_kernels.lora import LoraPair, LoraShape

_PAIR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|embedding_(?P<eside>[AB]))"
)
_BASE_LAYER = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 3
# Rows of an embedding that are compared at a time.
_ROWS_AT_ONCE = 8192
# Of a row's largest number: the model's may have been rounded to 8 bits.
_ROUNDING = 0.02


@dataclass(frozen=True)
class LayerPairs:
    """What an adapter has for one layer of ours.

    Attributes:
        shape: the layer's.
        embedding: whether it is one.
        pairs: one a part; None where the adapter has none.
    """

    shape: LoraShape
    embedding: bool
    pairs: list[LoraPair | None]


@dataclass(frozen=True)
class LoadedWeights:
    """An adapter as its files have it.

    Attributes:
        description: what is told of it.
        layers: by the layer's path in our model.
    """

    description: AdapterDescription
    layers: dict[str, LayerPairs]


@dataclass
class _Names:
    """The tensors of one module, by their names in the file."""

    embedding: bool
    down: str = ""
    up: str = ""


@dataclass(frozen=True)
class _Target:
    """A module that adapters can change."""

    path: str
    layer: MatrixLayer
    part: int
    num_parts: int
    outputs: int


@dataclass
class AdapterTargets:
    """The modules of a model that adapters can change, by Hugging Face's names.

    Args:
        model: ours.
        device: where it is.
    """

    model: CausalLM
    device: torch.device
    _by_name: dict[str, _Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, layer in adapted_layers(self.model):
            parts = layer.adapted_parts(path)
            for index, (name, size) in enumerate(parts.items()):
                self._by_name[name] = _Target(path, layer, index, len(parts), size)

    def find(self, module: str) -> _Target | None:
        """A module by its name, that of the bare decoder included."""
        return self._by_name.get(module) or self._by_name.get(self.model.base_prefix + module)


def adapted_layers(model: CausalLM) -> Iterator[tuple[str, MatrixLayer]]:
    """The layers that adapters can change, by path."""
    for path, module in model.named_modules():
        if isinstance(module, MatrixLayer):
            yield path, module


def load_weights(
    folder: AdapterFolder, targets: AdapterTargets, max_rank: int, architecture: str
) -> LoadedWeights:
    """Reads and checks an adapter.

    Args:
        folder: its files.
        targets: of the model it is for.
        max_rank: the highest rank that is served.
        architecture: the model's, for messages.

    Raises:
        UnsupportedAdapterError: it is of a kind that is not served.
        AdapterFileError: a file is missing or corrupt, or not of this model.
    """
    raw = read_config(folder)
    config = PeftConfig.parse(raw)
    path = weights_file(folder)
    try:
        source = SafetensorsSource(path)
        try:
            return _Reader(source, config, raw, targets, max_rank, architecture).read()
        finally:
            source.close()
    except ModelFileError as error:
        raise AdapterFileError(error.message.replace(str(path), path.name)) from error
    except OSError as error:
        raise AdapterFileError(f"{path.name} can't be read ({error.strerror})") from error


class _Reader:
    def __init__(
        self,
        source: SafetensorsSource,
        config: PeftConfig,
        raw: dict[str, object],
        targets: AdapterTargets,
        max_rank: int,
        architecture: str,
    ) -> None:
        self._source = source
        self._config = config
        self._targets = targets
        self._max_rank = max_rank
        self._architecture = architecture
        self._digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())

    def read(self) -> LoadedWeights:
        modules, base_layers = self._modules()
        targets = self._find_targets(modules)
        # All that a header can tell of is found wrong before anything is read.
        for module, names in modules.items():
            self._check(module, names, targets[module])
        for module, name in base_layers.items():
            self._check_base_layer(module, name)
        layers: dict[str, LayerPairs] = {}
        for module, names in modules.items():
            target = targets[module]
            layer = layers.setdefault(
                target.path,
                LayerPairs(target.layer.lora_shape(), names.embedding, [None] * target.num_parts),
            )
            layer.pairs[target.part] = LoraPair(
                self._tensor(names.down), self._tensor(names.up), self._config.scale_of(module)
            )
        pairs = [pair for layer in layers.values() for pair in layer.pairs if pair is not None]
        description = AdapterDescription(
            weights_version=self._digest.hexdigest(),
            rank=max(pair.rank for pair in pairs),
            alpha=self._config.alpha,
            use_rslora=self._config.use_rslora,
            modules=sorted({module.rpartition(".")[2] for module in modules}),
            num_bytes=sum(pair.down.nbytes + pair.up.nbytes for pair in pairs),
            base_model=self._config.base_model,
        )
        return LoadedWeights(description, layers)

    def _modules(self) -> tuple[dict[str, _Names], dict[str, str]]:
        """The file's tensors by module: pairs, and weights of embeddings that PEFT keeps beside."""
        modules: dict[str, _Names] = {}
        base_layers: dict[str, str] = {}
        for name in sorted(self._source.names()):
            if "lora_magnitude_vector" in name:
                raise UnsupportedAdapterError(
                    f"the weights hold {name}: DoRA is not served; merge the adapter into its "
                    "model by PEFT's merge_and_unload()"
                )
            if (match := _PAIR.fullmatch(name)) is not None:
                side = match["side"] or match["eside"]
                names = modules.setdefault(match["module"], _Names(match["eside"] is not None))
                if names.embedding != (match["eside"] is not None):
                    raise AdapterFileError(f"{match['module']} has pairs of two kinds")
                if side == "A":
                    names.down = name
                else:
                    names.up = name
            elif (match := _BASE_LAYER.fullmatch(name)) is not None:
                base_layers[match["module"]] = name
            else:
                raise UnsupportedAdapterError(
                    f"the weights hold {name}, which is no part of a LoRA that is served"
                )
        for module, names in modules.items():
            if not (names.down and names.up):
                raise AdapterFileError(
                    f"{module} has only one of its two matrices; the file is incomplete"
                )
        return modules, base_layers

    def _find_targets(self, modules: dict[str, _Names]) -> dict[str, _Target]:
        found = {module: self._targets.find(module) for module in modules}
        missing = [module for module, target in found.items() if target is None]
        if len(missing) == len(found):
            wanted = ", ".join(missing[:_SHOWN]) or self._config.target_modules or "none"
            raise AdapterFileError(
                f"the adapter matches no module of this {self._architecture}: it changes "
                f"{wanted}{self._trained_on()}"
            )
        if missing:
            raise AdapterFileError(
                f"this {self._architecture} has no {', '.join(missing[:_SHOWN])}"
                f"{' and others' * (len(missing) > _SHOWN)}, which the adapter changes"
                f"{self._trained_on()}"
            )
        return {module: target for module, target in found.items() if target is not None}

    def _check(self, module: str, names: _Names, target: _Target) -> None:
        if isinstance(target.layer, Embedding) != names.embedding:
            raise AdapterFileError(f"{module} is an embedding on one side alone")
        down, up = self._source.shape(names.down), self._source.shape(names.up)
        rank = self._config.rank_of(module)
        if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise AdapterFileError(
                f"{module}: matrices of {list(down)} and {list(up)} do not go together"
            )
        if down[0] != rank:
            raise AdapterFileError(
                f"{module} has rank {down[0]}, and adapter_config.json says {rank}; config and "
                "weights are of different adapters"
            )
        if rank > self._max_rank:
            raise AdapterFileError(
                f"{module} has rank {rank}, and the engine takes up to {self._max_rank}; start it "
                f"with --max-lora-rank {rank}"
            )
        wanted = (target.layer.lora_shape().inputs, target.outputs)
        if (down[1], up[0]) != wanted:
            raise AdapterFileError(
                f"{module} goes from {down[1]} to {up[0]}, and this model's from {wanted[0]} to "
                f"{wanted[1]}: the adapter is of another model{self._trained_on()}"
            )

    def _check_base_layer(self, module: str, name: str) -> None:
        """PEFT keeps embeddings beside pairs for them; they must be the model's own."""
        target = self._targets.find(module)
        layer = None if target is None else target.layer
        shape = self._source.shape(name)
        if isinstance(layer, LMHead) and layer.tied:
            layer = self._targets.model.input_embedding()
        if not isinstance(layer, Embedding | LMHead):
            raise UnsupportedAdapterError(f"the weights hold a whole {module}: not served")
        own = layer.lora_shape()
        rows = own.inputs if isinstance(layer, Embedding) else own.outputs
        columns = own.outputs if isinstance(layer, Embedding) else own.inputs
        if shape != (rows, columns):
            raise UnsupportedAdapterError(
                f"the weights hold a {module} of {list(shape)}, and the model's is "
                f"{[rows, columns]}: adapters that add tokens to the vocabulary are not served; "
                "merge the adapter into its model by PEFT's merge_and_unload()"
            )
        theirs = self._tensor(name)
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = theirs[start : start + _ROWS_AT_ONCE].float()
            ids = torch.arange(start, start + len(part), device=self._targets.device)
            ours = layer.rows_of_weight(ids).float().cpu()
            largest = ours.abs().amax(dim=1, keepdim=True)
            if bool(((part - ours).abs() > _ROUNDING * largest + 1e-6).any()):
                raise UnsupportedAdapterError(
                    f"the weights hold a {module} that differs from the model's: it was trained in "
                    "full, or is another model's; neither is served"
                )

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor's numbers, which become part of the version."""
        whole = torch.empty(self._source.shape(name), dtype=self._source.dtype(name))
        if whole.dtype not in _FLOATS:
            raise AdapterFileError(f"{name} holds {whole.dtype}, and no floating-point numbers")
        self._source.read_into(name, whole)
        self._digest.update(f"{name}\0{whole.dtype}\0{list(whole.shape)}\0".encode())
        self._digest.update(whole.view(torch.uint8).numpy().data)
        if not bool(torch.isfinite(whole).all()):
            raise AdapterFileError(f"{name} holds NaN or infinite numbers: the training failed")
        return whole.float() if whole.dtype is torch.float64 else whole

    def _trained_on(self) -> str:
        name = self._config.base_model
        return f" (it was trained on {name[:200]})" if name else ""
