"""All decoder layers of a Llama-like model in one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pagewire_kernels.attention import AttentionMetadata
from pagewire_kernels.cpu import DTYPES
from pagewire_kernels.cpu_lora import CpuTable, LoraLinearPointers, check_slots
from pagewire_kernels.cpu_weights import PackedWeight
from pagewire_kernels.decoder import DecoderLayer, DecoderShape
from pagewire_kernels.lora import LoraRows, LoraTable

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("dtype", _INT),
        ("outputs", _INT),
        ("depth", _INT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _POINTER),
        ("qkv", _Matrix),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("output", _Matrix),
        ("post_norm", _POINTER),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("key_cache", _POINTER),
        ("value_cache", _POINTER),
        ("sliding_window", _INT),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("num_layers", _INT),
        ("hidden_size", _INT),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("slots", _POINTER),
        ("query_starts", _POINTER),
        ("context_lengths", _POINTER),
        ("block_tables", _POINTER),
        ("num_tokens", _INT),
        ("num_sequences", _INT),
        ("num_decodes", _INT),
        ("table_width", _INT),
        ("block_size", _INT),
        ("cache_dtype", _INT),
        ("num_threads", _INT),
        ("adapters", _POINTER),
        ("adapter_slots", _POINTER),
    ]


class _Adapters(ctypes.Structure):
    _fields_ = [
        ("qkv", LoraLinearPointers),
        ("output", LoraLinearPointers),
        ("gate_up", LoraLinearPointers),
        ("down", LoraLinearPointers),
    ]


class CpuDecoder:
    """Layers of norm, attention with rotary positions, norm and SwiGLU, each with its residual."""

    attention = "cpu"

    def __init__(
        self, library: ctypes.CDLL, shape: DecoderShape, layers: Sequence[DecoderLayer]
    ) -> None:
        self._run = library.pagewire_decoder
        self._kept = list(layers)  # a pointer alone keeps no tensor alive
        self._shape = _Shape(
            len(layers),
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.eps,
            shape.scale,
        )
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._adapters: ctypes.Array[_Adapters] | None = None
        if all(layer.adapters is not None for layer in layers):
            self._adapters = (_Adapters * len(layers))(*map(_adapters, layers))
        self._caches: list[torch.Tensor] = []

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: AttentionMetadata,
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
        adapter_rows: LoraRows | None = None,
    ) -> torch.Tensor:
        """See Decoder. Hidden states, cosines and sines are fp32.

        Raises:
            ValueError: dtypes or memory layouts that the kernels do not read.
        """
        cache = key_caches[0]
        _check(hidden, cos, sin)
        if cache.dtype not in DTYPES or cache.dtype is torch.int8 or not cache.is_contiguous():
            raise ValueError(f"the cpu kernels read contiguous caches, and none of {cache.dtype}")
        self._use_caches(key_caches, value_caches)
        step = _Step(
            cos.data_ptr(),
            sin.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            metadata.query_start_locations.data_ptr(),
            metadata.context_lengths.data_ptr(),
            metadata.block_tables.data_ptr(),
            hidden.shape[0],
            metadata.context_lengths.shape[0],
            metadata.num_decodes,
            metadata.block_tables.stride(0),
            cache.shape[1],
            DTYPES[cache.dtype],
            torch.get_num_threads(),
        )
        if adapter_rows is not None:
            if self._adapters is None:
                raise ValueError("these layers have no tables of adapters")
            step.adapters = ctypes.addressof(self._adapters)
            step.adapter_slots = check_slots(adapter_rows, len(hidden)).data_ptr()
        self._run(ctypes.byref(self._shape), self._layers, ctypes.byref(step), hidden.data_ptr())
        return hidden

    def _use_caches(
        self, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor]
    ) -> None:
        if self._caches and self._caches[0] is key_caches[0]:
            return
        for layer, keys, values in zip(self._layers, key_caches, value_caches, strict=True):
            layer.key_cache, layer.value_cache = keys.data_ptr(), values.data_ptr()
        self._caches = [*key_caches, *value_caches]


def _layer(weights: DecoderLayer) -> _Layer:
    return _Layer(
        _address(weights.input_norm),
        _matrix(weights.qkv, weights.qkv_bias),
        _address(weights.query_norm),
        _address(weights.key_norm),
        _matrix(weights.output, weights.output_bias),
        _address(weights.post_norm),
        _matrix(weights.gate_up, weights.gate_up_bias),
        _matrix(weights.down, weights.down_bias),
        None,
        None,
        weights.sliding_window or 0,
    )


def _adapters(weights: DecoderLayer) -> _Adapters:
    tables = weights.adapters
    assert tables is not None
    return _Adapters(
        *(_pointers(table) for table in (tables.qkv, tables.output, tables.gate_up, tables.down))
    )


def _pointers(table: LoraTable) -> LoraLinearPointers:
    assert isinstance(table, CpuTable)
    return table.pointers


def _matrix(weight: PackedWeight, bias: torch.Tensor | None) -> _Matrix:
    return _Matrix(
        weight.panels.data_ptr(),
        _address(weight.scales),
        _address(bias),
        DTYPES[weight.panels.dtype],
        weight.outputs,
        weight.depth,
    )


def _address(vector: torch.Tensor | None) -> int | None:
    if vector is None:
        return None
    _check(vector)
    return vector.data_ptr()


def _check(*tensors: torch.Tensor) -> None:
    """The C++ side trusts its pointers."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"the cpu decoder reads contiguous float32 tensors, not {tensor.dtype} with "
                f"strides {tensor.stride()}"
            )
