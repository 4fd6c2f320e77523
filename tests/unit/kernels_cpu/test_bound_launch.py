"""The short way to a kernel launches what Triton's own way would have, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu import bound_launch
from pagewire_kernels.gpu.launch import launch
from tests.fakes.null_gpu import null_gpu

NUMBERS = torch.zeros(64)
ALIGNED = (-NUMBERS.data_ptr() % 16) // 4
DTYPES = (torch.float32, torch.int32, torch.bfloat16)


@triton.jit(do_not_specialize=["free"])
def kernel(
    first: tl.tensor,
    second: tl.tensor,
    number: tl.tensor,
    free: tl.tensor,
    SIZE: tl.constexpr,
    FLAG: tl.constexpr,
) -> None:
    pass


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Of several dtypes, at addresses of any alignment that floats have."""
    starts = st.integers(ALIGNED, ALIGNED + 7)
    return st.builds(
        lambda start, dtype: NUMBERS[start : start + 4].view(dtype), starts, st.sampled_from(DTYPES)
    )


WHOLE = st.sampled_from([-32, -1, 0, 1, 2, 15, 16, 17, 48, 2**31 - 16, 2**31 - 1, 2**31, 2**40])
SCALARS = st.one_of(WHOLE, st.integers(-(2**31), 2**31), st.floats(-9, 9), st.booleans())
CALLS = st.tuples(
    st.tuples(tensors(), st.one_of(tensors(), st.none()), SCALARS, WHOLE),
    st.fixed_dictionaries(
        {
            "SIZE": st.sampled_from([1, 16]),
            "FLAG": st.booleans(),
            "num_warps": st.sampled_from([2, 4]),
        }
    ),
    st.sampled_from([(3,), (3, 2), (3, 2, 5)]),
    st.booleans(),
)


def addressed(value: Any) -> Any:
    """As the driver reads it: a pointer by its address."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def started(launched: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What the only launch was: what the kernel was compiled for, and the driver's arguments less
    the hooks."""
    [(compiled, *arguments)] = launched
    launched.clear()
    source = compiled.src
    about = (source.signature, source.constants, source.attrs, compiled.options)
    return (*about, arguments[:10], [addressed(value) for value in arguments[13:]])


@settings(max_examples=40)
@given(st.lists(CALLS, min_size=1, max_size=12))
def test_each_launch_is_the_one_that_triton_makes(calls: list[Any]) -> None:
    launched: list[tuple[Any, ...]] = []
    # What was compiled in another example notes its launches there.
    kernel.device_caches.clear()
    bound_launch._bound.clear()
    with null_gpu(launched):
        for arguments, options, grid, dependent in calls:
            extra = {"launch_pdl": True} if dependent else {}
            kernel[grid](*arguments, **options, **extra)
            expected = started(launched)
            for _ in range(2):
                launch(kernel, grid, *arguments, dependent=dependent, **options)
                assert started(launched) == expected


def test_a_launch_is_bound_once_and_noted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"SIZE": 8, "FLAG": True}
    with null_gpu(), recorded() as record:
        launch(kernel, (1,), NUMBERS, NUMBERS, 2, 3, **options)
        monkeypatch.setattr(type(kernel), "run", None)
        launch(kernel, (1,), NUMBERS, NUMBERS, 4, 5, **options)
        with pytest.raises(TypeError):
            launch(kernel, (1,), NUMBERS, NUMBERS, 16, 5, **options)
    assert record == {"kernel": 2}


def test_hooks_are_told_of_launches_bound_before() -> None:
    options: dict[str, Any] = {"SIZE": 4, "FLAG": False}
    told: list[Any] = []

    def tell(metadata: Any) -> None:
        told.append(metadata)

    with null_gpu():
        launch(kernel, (1,), NUMBERS, NUMBERS, 2, 3, **options)
        knobs.runtime.launch_enter_hook.add(tell)
        try:
            launch(kernel, (1,), NUMBERS, NUMBERS, 2, 3, **options)
        finally:
            knobs.runtime.launch_enter_hook.remove(tell)
    assert [each.get()["name"] for each in told] == ["kernel"]
