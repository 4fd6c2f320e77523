"""The xformers backend, with a stand-in for the library that computes what its masks say."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagewire_kernels import xformers_attention
from pagewire_kernels.attention import BackendUnavailableError, load_attention_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.attention import TritonAttention
from pagewire_kernels.torch_attention import TorchAttention
from pagewire_kernels.xformers_attention import XformersAttention
from tests.fakes.attention_batch import Batch, make_batch

LAYOUT: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
MIXED = ([5, 70], [(40, 40), (90, 25), (9, 1)])


@dataclass
class FakeMask:
    """BlockDiagonalCausalFromBottomRightMask: blocks of queries x keys, aligned at their ends."""

    lengths: list[int]
    contexts: list[int]
    window: int | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: list[int], kv_seqlen: list[int], *, device: torch.device
    ) -> FakeMask:
        return cls(q_seqlen, kv_seqlen)

    def make_local_attention_from_bottomright(self, window_size: int) -> FakeMask:
        return FakeMask(self.lengths, self.contexts, window_size)

    def visible(self) -> torch.Tensor:
        blocks = []
        for length, context in zip(self.lengths, self.contexts, strict=True):
            distance = torch.arange(context - length, context)[:, None] - torch.arange(context)
            block = distance >= 0
            blocks.append(block if self.window is None else block & (distance < self.window))
        return torch.block_diag(*blocks).bool()


class FakeFmha(types.ModuleType):
    """xformers.ops.fmha: three operators, of which some refuse."""

    def __init__(self, refusing: tuple[str, ...] = ("flash3",)) -> None:
        super().__init__("xformers.ops.fmha")
        self.masks: list[FakeMask] = []
        self.attn_bias = types.SimpleNamespace(BlockDiagonalCausalFromBottomRightMask=FakeMask)
        for name in ("flash3", "flash", "cutlass"):
            reasons = ["too old"] if name in refusing else []
            operator = types.SimpleNamespace(
                NAME=f"{name}F", not_supported_reasons=lambda inputs, reasons=reasons: reasons
            )
            setattr(self, name, types.SimpleNamespace(FwOp=operator))

    def Inputs(self, query: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return query

    def memory_efficient_attention_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_bias: FakeMask,
        scale: float,
        op: Any,
    ) -> torch.Tensor:
        assert query.shape[2:] == key.shape[2:] == value.shape[2:]
        assert key.stride(3) == value.stride(3) == 0, "shared heads must not be copied"
        self.masks.append(attn_bias)
        scores = torch.einsum("btkgd,bskgd->bkgts", query, key) * scale
        scores = scores.masked_fill(~attn_bias.visible(), -torch.inf)
        return torch.einsum("bkgts,bskgd->btkgd", scores.softmax(-1), value)


def attend(
    backend: TritonAttention | TorchAttention, batch: Batch, window: int | None = None
) -> torch.Tensor:
    return backend.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.metadata, 0.3, window
    )


@pytest.mark.parametrize("window", [None, 7, 64])
def test_equals_the_reference(window: int | None) -> None:
    batch = make_batch(*MIXED, **LAYOUT)
    fmha = FakeFmha()
    with recorded() as launches:
        got = attend(XformersAttention(fmha, False), batch, window)
    torch.testing.assert_close(got, attend(TorchAttention(), batch, window), atol=2e-6, rtol=2e-6)
    assert fmha.masks == [FakeMask([40, 25, 1], [40, 90, 9], window)]
    # Decodes are the Triton kernels', and nothing else stood in.
    assert launches.pop("decode_reduce", 1) == 1
    assert launches == {"xformers.flashF": 1, "decode_split": 1}


def test_masks_are_built_once_a_step_for_each_window() -> None:
    batch = make_batch([], [(40, 12)], **LAYOUT)
    fmha = FakeFmha()
    backend = XformersAttention(fmha, False)
    for window in (None, 7, None, 7):
        attend(backend, batch, window)
    assert fmha.masks[0] is fmha.masks[2]
    assert fmha.masks[1] is fmha.masks[3]


def test_sequences_without_rows_are_passed_over() -> None:
    fmha = FakeFmha()
    got = attend(XformersAttention(fmha, False), make_batch([], [(0, 0), (40, 12)], **LAYOUT))
    assert fmha.masks == [FakeMask([12], [40])]
    assert got.isfinite().all()
    attend(XformersAttention(fmha, False), make_batch([3], [(0, 0)], **LAYOUT))
    assert len(fmha.masks) == 1


def test_fp8_caches_are_gathered() -> None:
    batch = make_batch([], [(40, 12)], **LAYOUT, cache_dtype=torch.float8_e4m3fn)
    got = attend(XformersAttention(FakeFmha(), False), batch)
    torch.testing.assert_close(got, attend(TorchAttention(), batch), atol=2e-6, rtol=2e-6)


def test_a_batch_that_no_operator_takes_is_refused() -> None:
    fmha = FakeFmha(refusing=("flash3", "flash", "cutlass"))
    with pytest.raises(ValueError, match=r"heads of 16 .*flashF: too old.*backend triton"):
        attend(XformersAttention(fmha, False), make_batch(*MIXED, **LAYOUT))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a CUDA device."""
    monkeypatch.setattr(xformers_attention, "load_triton", lambda device: TritonAttention(False))


def _install(monkeypatch: pytest.MonkeyPatch, *, built_with_cuda: bool) -> None:
    library = types.ModuleType("xformers._cpp_lib")
    library._built_with_cuda = built_with_cuda  # type: ignore[attr-defined]
    library._cpp_library_load_exception = "no libcudart.so.12"  # type: ignore[attr-defined]
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", FakeFmha())
    monkeypatch.setitem(sys.modules, "xformers._cpp_lib", library)


@pytest.mark.usefixtures("on_cuda")
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'pagewire\[xformers\]'"):
        load_attention_backend("xformers", "cuda")
    _install(monkeypatch, built_with_cuda=False)
    with pytest.raises(BackendUnavailableError, match=r"no libcudart.so.12.*pagewire\[xformers\]"):
        load_attention_backend("xformers", "cuda")
    _install(monkeypatch, built_with_cuda=True)
    with pytest.raises(BackendUnavailableError, match="divisible by 8, not 20"):
        load_attention_backend("xformers", "cuda", 20)


@pytest.mark.usefixtures("on_cuda")
def test_it_is_found_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, built_with_cuda=True)
    assert load_attention_backend("xformers", "cuda", 64).name == "xformers"


def test_it_is_offered_on_cuda_only() -> None:
    with pytest.raises(BackendUnavailableError, match="'xformers' runs on CUDA devices, not on"):
        load_attention_backend("xformers", "cpu")
