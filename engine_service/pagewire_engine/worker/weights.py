"""The model's weights on the worker's device."""

from __future__ import annotations

import torch

from pagewire.config import EngineConfig
from pagewire.errors import FailedPreconditionError
from pagewire_engine.model_files import ModelDescription, ModelFiles
from pagewire_engine.models.base import Model
from pagewire_engine.models.weight_loading import load_model
from pagewire_engine.worker.memory import gib
from pagewire_engine.worker.precision import quantizes
from pagewire_kernels.dense import DenseBackend


def load_weights(
    files: ModelFiles,
    description: ModelDescription,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    dense: DenseBackend,
) -> Model:
    """The model as the settings want it.

    Raises:
        PagewireError: the files can't be served, or the device has no room for them.
    """
    try:
        return load_model(
            files,
            description,
            dtype=dtype,
            device=device,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            dense=dense,
            quantize=quantizes(config.quantization, device),
        )
    except torch.OutOfMemoryError as error:
        _, total = torch.cuda.mem_get_info(device)
        raise FailedPreconditionError(
            f"the weights do not fit in the memory of {device} ({gib(total)}, shared "
            "with what else runs there); use a smaller model or dtype, or another GPU",
            field="model",
        ) from error
