"""The xformers backend on a CUDA device, where the library is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagewire_kernels.attention import load_attention_backend
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.attention_batch import make_batch

pytest.importorskip("xformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("window", [None, 100], ids=["all keys", "window"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64)])
def test_equals_the_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    layout: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    chunks = [(900, 130), (300, 300), (65, 2)]
    batch = make_batch([1, 700, 64], chunks, **layout, dtype=dtype, device="cuda")
    backend = load_attention_backend("xformers", "cuda", head_dim)
    arguments = (batch.query, batch.key_cache, batch.value_cache, batch.metadata, head_dim**-0.5)
    with recorded() as launches:
        got = backend.paged_attention(*arguments, window)
    operators = [name for name in launches if name.startswith("xformers.")]
    assert len(operators) == 1
    assert set(launches) - set(operators) == {"decode_split", "decode_reduce"}
    wide = (*(part.float() for part in arguments[:3]), batch.metadata, head_dim**-0.5)
    expected = TorchAttention().paged_attention(*wide, window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
