"""The threads of the C++ kernels, when several callers want them and when they have slept."""

from __future__ import annotations

import subprocess
import sys
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


def test_a_forked_process_has_threads_of_its_own() -> None:
    program = """
import os, torch
from pagewire_kernels.cpu_dense import CpuDense
torch.set_num_threads(2)
dense = CpuDense()
weight, hidden = dense.pack(torch.ones(700, 300)), torch.ones(40, 300)
expected = dense.linear(hidden, weight)
child = os.fork()
if child == 0:
    # Few elements: torch itself can't compute in parallel after a fork.
    same = torch.equal(dense.linear(hidden, weight), expected)
    os._exit(0 if same and len(os.listdir("/proc/self/task")) > 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(dense.linear(hidden, weight), expected)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
