"""The GPU's sampling kernels compile for an H100, and wait before they read or write."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.gpu import sampling, sampling_logprobs
from pagewire_kernels.gpu.sampling import Epilogue, SamplingColumns, SamplingWorkspace
from pagewire_kernels.gpu.sampling_penalties import PenaltyState
from tests.fakes.hopper_compiler import compile_launches

VOCAB_SIZE = 128_256
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")


def integers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def sample(**options: Any) -> None:
    columns = SamplingColumns(
        temperature=torch.zeros(1),
        min_p=torch.zeros(1),
        top_k=integers(1),
        top_p=torch.zeros(1),
        seed=torch.zeros(1, dtype=torch.int64),
        sequence_index=integers(1),
        position=integers(1),
    )
    logits = torch.zeros((1, VOCAB_SIZE), dtype=torch.bfloat16)
    workspace = SamplingWorkspace(1, VOCAB_SIZE, "cpu")
    epilogue = Epilogue(integers(1), integers(1), options.pop("holds", None))
    sampling.sample(
        logits, integers(1), columns, integers(1), workspace, epilogue=epilogue, **options
    )


def sample_with_everything() -> None:
    state = PenaltyState(VOCAB_SIZE, 1, "cpu", num_histories=1, num_biases=1)
    sample(adjustments=state.adjustments, logit_rows=integers(1), holds=integers(1))


def logprobs() -> None:
    logits = torch.zeros((1, VOCAB_SIZE), dtype=torch.bfloat16)
    sampling_logprobs.raw_logprobs(logits, integers(1), 0, integers(1))


@pytest.mark.parametrize(
    ("module", "call"),
    [(sampling, sample), (sampling, sample_with_everything), (sampling_logprobs, logprobs)],
    ids=lambda value: value.__name__,
)
def test_kernels_compile_and_wait_before_they_read_or_write(module: Any, call: Any) -> None:
    chunks, rows = compile_launches(module, call)
    for kernel in (chunks, rows):
        before, wait, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
        assert wait
        assert "griddepcontrol.launch_dependents" in before
        memory = r"\b(ld\.global|st\.global|cp\.async|red\.|atom\.)"
        assert not re.search(memory, before)
        assert re.search(memory, after)
    # Four neighbouring tokens, or more, a load.
    assert re.search(r"ld\.global\.v[24]", chunks.asm["ptx"])
