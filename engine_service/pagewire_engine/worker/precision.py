"""In which numbers a model computes, and keys and values are kept."""

from __future__ import annotations

import torch

from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_engine.model_files import ModelDescription

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_dtype(name: str, description: ModelDescription, device: torch.device) -> torch.dtype:
    """What the weights are held in, and the model computes in. `auto` is float32 on CPU, elsewhere
    what the model was published in; of embeddings whose model does not say, float32, since small
    differences between them count."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(description.hf_config, "dtype", None)
    if isinstance(own, str):
        own = _DTYPES.get(own)
    if isinstance(own, torch.dtype):
        return own
    return torch.bfloat16 if description.pooler is None else torch.float32


def cache_dtype(name: str, own: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in; `own` is what auto means.

    Raises:
        InvalidArgumentError: fp8 where no kernel reads it.
    """
    if name != "fp8":
        return _DTYPES.get(name, own)
    if device.type != "cuda":
        raise InvalidArgumentError(
            "kv_cache_dtype", "fp8 needs a CUDA device; on CPU bfloat16 is the smallest"
        )
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise InvalidArgumentError(
            "kv_cache_dtype",
            f"fp8 needs a GPU of compute capability 8.9 or later, and {device} is older; use auto",
        )
    return torch.float8_e4m3fn


def quantizes(quantization: str, device: torch.device) -> bool:
    """Whether linears keep their weights in 8 bits.

    Raises:
        FailedPreconditionError: no kernel of this device reads such weights.
    """
    if quantization == "none":
        return False
    if device.type != "cpu":
        raise FailedPreconditionError(
            f"{quantization} weights have kernels for CPUs only; leave quantization out, or "
            "use --device cpu",
            field="quantization",
        )
    return True


def dtype_name(dtype: torch.dtype) -> str:
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")
