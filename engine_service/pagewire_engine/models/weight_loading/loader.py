"""Builds a model and fills every parameter exactly once.

A layer is quantised and packed as soon as its last tensor has arrived. New parameters take no
memory before they are written, so that at most one layer is held in two forms.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from pagewire_engine.model_files import ModelDescription, ModelFiles
from pagewire_engine.models.base import CausalLM, Model, construction
from pagewire_engine.models.errors import ModelFileError, building_from
from pagewire_engine.models.layers import Embedding, Layer, Linear, LMHead, MatrixLayer
from pagewire_engine.models.registry import model_class
from pagewire_engine.models.weight_loading.dummy_source import DummySource
from pagewire_engine.models.weight_loading.safetensors_source import SafetensorsSource
from pagewire_engine.models.weight_loading.sources import TensorSource
from pagewire_kernels.dense import DenseBackend, TorchDense

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
_SHOWN = 5
# Threads that read files, by device. On CPU one: a second would compete with what packs weights.
_READERS = {"cpu": 1, "cuda": 8}
# Tensors that may be read before the first of them is packed, by reader.
_AHEAD = 2


def load_model(
    files: ModelFiles,
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dummy_seed: int | None = None,
    dense: DenseBackend | None = None,
    quantize: bool = False,
) -> Model:
    """The model with its weights.

    Args:
        files: where it is.
        description: what it is.
        dtype: of parameters, and of what torch computes.
        device: where they live.
        dummy_seed: random weights of this seed instead of the files'.
        dense: the kernels it shall compute with. Default: torch's.
        quantize: round the weights of linears to int8.

    Raises:
        ModelFileError: a file is corrupt, or its tensors are not the ones the config asks for.
    """
    started = time.monotonic()
    config = description.hf_config
    source: TensorSource | None = None
    if dummy_seed is None and files.gguf is not None:
        from pagewire_engine.models.weight_loading.gguf_source import GGUFSource

        source = gguf_source = GGUFSource(files.gguf)
        config.rope_frequency_divisors = gguf_source.rope_divisors()
    elif dummy_seed is None:
        source = SafetensorsSource(files.path)
    with building_from(str(files.gguf or files.path)), construction(dtype, device):
        model = model_class(description.architecture)(config, description.max_model_len)
    if source is None:
        source = DummySource(model.checkpoint_tensors(), dummy_seed or 0)
    try:
        fill(model, source, dense, quantize=quantize)
    finally:
        source.close()
    logger.info("weights loaded in %.1f s", time.monotonic() - started)
    return model.eval()


def fill(
    model: Model,
    source: TensorSource,
    dense: DenseBackend | None = None,
    *,
    quantize: bool = False,
) -> None:
    """Copies every tensor of the source to its place; for the rest see load_model.

    Raises:
        ModelFileError: a tensor is missing, left over, given twice, or has another shape.
    """
    if isinstance(model, CausalLM):
        _untie_if_different(model, source)
    places = model.checkpoint_tensors()
    names = _names_of_places(model, source, places)
    unfinished = _Unfinished(model, dense or TorchDense(), quantize)
    for place_name in _read_all(source, names, places):
        unfinished.filled(place_name)
    model.use_kernels(unfinished.dense)


def _names_of_places(
    model: Model, source: TensorSource, places: dict[str, torch.Tensor]
) -> dict[str, str]:
    """The source's name of each place, in the source's order.

    Raises:
        ModelFileError: as `fill` does.
    """
    names: dict[str, str] = {}
    extra = []
    for name in source.names():
        place_name = _place_name(model, name, places)
        if place_name is None:
            if not _is_harmless(model, name):
                extra.append(name)
            continue
        if place_name in names:
            raise ModelFileError(
                f"{source.where(name)} holds both {names[place_name]} and {name}", field="model"
            )
        place = places[place_name]
        if source.shape(name) != tuple(place.shape):
            raise ModelFileError(
                f"{source.where(name)}: {name} has shape {list(source.shape(name))}, but the "
                f"config asks for {list(place.shape)}; config and weights are of different models",
                field="model",
            )
        names[place_name] = name
    _check_complete(extra, [name for name in places if name not in names])
    return names


def _read_all(
    source: TensorSource, names: dict[str, str], places: dict[str, torch.Tensor]
) -> Iterator[str]:
    """Reads every tensor to its place, and yields the places' names in order, as they are filled.

    Places are taken out of `places`: a view of a weight that is packed then would keep its memory.
    """
    device = next(iter(places.values())).device
    num_readers = _READERS[device.type] if source.reads_in_parallel else 1
    if num_readers == 1:
        for place_name, name in names.items():
            source.read_into(name, places.pop(place_name))
            yield place_name
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # readers have streams of their own
    under_way: deque[tuple[str, Future[None]]] = deque()
    with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as pool:
        for place_name, name in names.items():
            if len(under_way) == _AHEAD * num_readers:
                yield _landed(under_way)
            future = pool.submit(source.read_into, name, places.pop(place_name))
            under_way.append((place_name, future))
        while under_way:
            yield _landed(under_way)


def _landed(under_way: deque[tuple[str, Future[None]]]) -> str:
    name, future = under_way.popleft()
    future.result()
    return name


class _Unfinished:
    """Layers that wait for tensors; each is given its final form when it has them all."""

    def __init__(self, model: Model, dense: DenseBackend, quantize: bool) -> None:
        self.dense = dense
        self._shared = _tied_embedding(model)
        self._quantize = quantize
        self._layers: dict[str, Layer] = {}
        self._waiting: dict[Layer, int] = {}
        for path, layer in model.named_modules():
            if isinstance(layer, Layer):
                names = [name for name, _ in layer.checkpoint_tensors(path)]
                self._layers.update(dict.fromkeys(names, layer))
                self._waiting[layer] = len(names)

    def filled(self, name: str) -> None:
        layer = self._layers[name]
        self._waiting[layer] -= 1
        if self._waiting[layer]:
            return
        if self._quantize and isinstance(layer, MatrixLayer) and self._multiplies(layer):
            layer.quantize()
        layer.use_kernels(self.dense)

    def _multiplies(self, layer: MatrixLayer) -> bool:
        """An embedding is only looked up, unless the head shares it."""
        return isinstance(layer, Linear | LMHead) or layer is self._shared


def _place_name(model: Model, name: str, places: dict[str, torch.Tensor]) -> str | None:
    """Checkpoints of the bare model leave its prefix out."""
    if name in places:
        return name
    prefixed = model.base_prefix + name
    return prefixed if prefixed in places else None


def _tied_embedding(model: Model) -> Embedding | None:
    """The embedding that the head shares, if there is one that does."""
    if isinstance(model, CausalLM) and model.lm_head.tied:
        return model.input_embedding()
    return None


def _is_harmless(model: Model, name: str) -> bool:
    is_copy_of_embedding = name == _HEAD and _tied_embedding(model) is not None
    return is_copy_of_embedding or model.ignored_tensors.search(name) is not None


def _check_complete(extra: list[str], missing: list[str]) -> None:
    problems = [
        f"{word} {len(names)} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for word, names in (("lacks", missing), ("holds unexpected", extra))
        if names
    ]
    if problems:
        raise ModelFileError(
            f"the checkpoint {' and '.join(problems)} of the config's tensors; config and weights "
            "are of different models, or the download is incomplete",
            field="model",
        )


def _untie_if_different(model: CausalLM, source: TensorSource) -> None:
    """A tied config whose checkpoint has a head of its own: the checkpoint is right.

    transformers decides the same way.
    """
    if not model.lm_head.tied or _HEAD not in source.names():
        return
    embedding = model.input_embedding().weight
    names = [n for n, place in model.checkpoint_tensors().items() if place is embedding]
    candidates = [n for n in source.names() if model.base_prefix + n in names or n in names]
    if not candidates or source.shape(candidates[0]) != source.shape(_HEAD):
        return
    values = []
    for name in (candidates[0], _HEAD):
        value = torch.empty(source.shape(name), dtype=embedding.dtype, device=embedding.device)
        source.read_into(name, value)
        values.append(value)
    if torch.equal(values[0], values[1]):
        return
    logger.warning("the config ties the embeddings, but the checkpoint's head differs: not tied")
    vocab_size, size = source.shape(_HEAD)
    with construction(embedding.dtype, embedding.device):
        model.lm_head = LMHead(size, vocab_size, None)
