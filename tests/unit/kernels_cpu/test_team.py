"""The threads of the C++ kernels, when several callers want them and when they have slept."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from pagewire_kernels.cpu_dense import CpuDense

pytestmark = pytest.mark.usefixtures("built_kernels")


def products(dense: CpuDense, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = dense.pack(torch.randn(700, 300, generator=generator))
    return [dense.linear(torch.randn(n, 300, generator=generator), weight) for n in range(1, 60)]


def test_callers_at_one_time_get_what_each_gets_alone() -> None:
    dense = CpuDense()
    alone = [products(dense, seed) for seed in range(4)]
    got: dict[int, list[torch.Tensor]] = {}
    callers = [
        threading.Thread(target=lambda seed=seed: got.update({seed: products(dense, seed)}))
        for seed in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for seed, expected in enumerate(alone):
        assert all(map(torch.equal, got[seed], expected))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    dense, before = CpuDense(), torch.get_num_threads()
    expected = products(dense, 0)
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, products(dense, 0), expected))
    finally:
        torch.set_num_threads(before)


def test_threads_that_fell_asleep_wake_up() -> None:
    dense = CpuDense()
    expected = products(dense, 1)
    for pause_s in (0.0, 0.0002, 0.002, 0.05):
        time.sleep(pause_s)
        assert all(map(torch.equal, products(dense, 1), expected))


def test_idle_threads_take_no_time() -> None:
    products(CpuDense(), 2)
    time.sleep(0.05)
    started = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - started < 0.15
