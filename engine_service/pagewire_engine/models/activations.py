"""Activation functions by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pagewire_engine.models.errors import UnsupportedModelError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.sigmoid(1.702 * hidden)


def _relu_squared(hidden: torch.Tensor) -> torch.Tensor:
    return F.relu(hidden).square_()


# The names of the tanh approximation differ in how they round, not in what they compute.
_TANH_GELU: Activation = partial(F.gelu, approximate="tanh")

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_accurate": _TANH_GELU,
    "quick_gelu": _quick_gelu,
    "mish": F.mish,
    "relu": F.relu,
    "relu2": _relu_squared,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Activation:
    """The function of that name.

    Raises:
        UnsupportedModelError: there is none here.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"the model's activation {name!r} is not supported; supported are "
            + ", ".join(sorted(_ACTIVATIONS))
        )
    return _ACTIVATIONS[name]
