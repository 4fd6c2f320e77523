"""The kernels that keep a batch's state compile for an H100, and none waits for a compilation when
a step is of another size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagewire_kernels.gpu import batch_inputs, batch_state
from pagewire_kernels.gpu.batch_inputs import BatchInputs, Parts
from pagewire_kernels.gpu.batch_state import BatchState, Changes
from tests.fakes.hopper_compiler import compile_launches

CPU = torch.device("cpu")
STATE = BatchState.empty(8, 32, CPU)
INPUTS = BatchInputs.empty(4, 64, 32, CPU)
PACKED = torch.zeros(256, dtype=torch.int32)


def apply_changes() -> None:
    changes = Changes(0, 1, 32, 64, 16, 96, 2)
    batch_state.apply_changes(STATE, PACKED, changes, INPUTS.slots, INPUTS.holds)


def prepare_decodes() -> None:
    batch_inputs.prepare_decodes(STATE, INPUTS, 4, block_size=16)


def prepare_parts() -> None:
    parts = Parts(
        records_at=0,
        tokens_at=32,
        wanted_at=64,
        num_wanted=1,
        count=1,
        num_decodes=0,
        num_tokens=7,
        longest=7,
        width=2,
        room=(4, 16),
    )
    batch_inputs.prepare_parts(STATE, INPUTS, PACKED, parts, block_size=16)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.parametrize(
    ("module", "call"),
    [
        (batch_state, apply_changes),
        (batch_inputs, prepare_decodes),
        (batch_inputs, prepare_parts),
    ],
)
def test_a_kernel_compiles(module: ModuleType, call: Callable[[], None]) -> None:
    (kernel,) = compile_launches(module, call)
    assert "st.global" in kernel.asm["ptx"]


@pytest.mark.parametrize("function", [batch_state._apply_changes, batch_inputs._prepare_parts])
def test_nothing_is_specialised_for_numbers_that_change(function: Any) -> None:
    changing = {name for name in function.arg_names if name.endswith("_at") or "num_" in name}
    changing |= {name for name in function.arg_names if name.startswith("room_")}
    assert changing <= set(function.do_not_specialize)
