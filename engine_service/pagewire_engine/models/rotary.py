"""Tables of rotary position embeddings, with the scalings of transformers' configs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from pagewire_engine.models.errors import UnsupportedModelError
from pagewire_engine.models.layers import KernelUser, Rotation

_SCALED = ("linear", "dynamic", "yarn", "longrope")


class RotaryTable(KernelUser):
    """Cosines and sines of positions 0 .. max_positions - 1, computed once in fp32.

    A token's rotation is a function of its position alone, so that chunking, preemption and batch
    mates never change it. Two scalings of transformers depend on the length of the sequence
    instead: `dynamic` rotates position p here as a sequence of p + 1 tokens (as cached decoding
    does there), and `longrope` takes the long factors when max_positions goes past the original
    length, the short ones else.
    """

    def __init__(self, config: Any, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):  # transformers' functions mix devices otherwise
            angles, factor = _angles(config, max_positions)
            cos, sin = angles.cos() * factor, angles.sin() * factor
        self.dtype = dtype
        self.cos = nn.Buffer(cos.to(device), persistent=False)
        self.sin = nn.Buffer(sin.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at positions int64 [T]."""
        return Rotation(positions, self.cos, self.sin, self.dense.activations(self.dtype))


def head_dim_of(config: Any) -> int:
    """The size of a head, where a config may leave it to be derived."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _angles(config: Any, max_positions: int) -> tuple[torch.Tensor, float]:
    """fp32 [max_positions, head_dim / 2], and the factor on cosines and sines."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    positions = torch.arange(max_positions, dtype=torch.float32)
    if kind == "default":
        return torch.outer(positions, _default_frequencies(config)), 1.0
    if kind == "llama3":
        return torch.outer(positions, _llama3_frequencies(config)), 1.0
    if kind not in _SCALED:
        raise UnsupportedModelError(
            f"rope type {kind!r} is not supported; supported are default, llama3, "
            + ", ".join(_SCALED)
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS[kind]
    if kind == "dynamic":
        return _dynamic_angles(config, max_positions, compute)
    frequencies, factor = compute(config, device="cpu", seq_len=max_positions)
    return torch.outer(positions, frequencies.float()), float(factor)


def _default_frequencies(config: Any) -> torch.Tensor:
    dim = head_dim_of(config)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies: torch.Tensor = 1.0 / (config.rope_parameters["rope_theta"] ** exponents)
    # A Llama 3 GGUF ships its rope scaling as a tensor of divisors.
    divisors = getattr(config, "rope_frequency_divisors", None)
    if divisors is not None:
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    return frequencies


def _llama3_frequencies(config: Any) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones left alone, and those between go over from
    the one to the other (arXiv:2407.21783, and Meta's llama-models, `apply_scaling`)."""
    parameters = config.rope_parameters
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    frequencies = _default_frequencies(config)
    # How often a wave repeats within the context that the model was made for.
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: torch.Tensor = frequencies * (share + (1.0 - share) / parameters["factor"])
    return stretched


def _dynamic_angles(config: Any, max_positions: int, compute: Any) -> tuple[torch.Tensor, float]:
    """NTK scaling by the length so far; unscaled up to max_position_embeddings."""
    frequencies, factor = compute(config, device="cpu")
    trained = min(max_positions, config.max_position_embeddings)
    rows = [torch.outer(torch.arange(trained, dtype=torch.float32), frequencies)]
    for position in range(trained, max_positions):
        frequencies, _ = compute(config, device="cpu", seq_len=position + 1)
        rows.append((position * frequencies)[None])
    return torch.cat(rows), float(factor)
