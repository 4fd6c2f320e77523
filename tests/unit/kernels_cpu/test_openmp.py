"""The threads that OpenMP keeps for whoever computed once."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: other tests' threads have teams too.
_PROGRAM = """
import os, threading, torch
from pagewire_kernels.openmp import release_threads

torch.set_num_threads(2)
def threads():
    return len(os.listdir("/proc/self/task"))
def compute():
    return torch.ones(1 << 20).exp().sum().item()

compute()
with_team = threads()
told = release_threads()
released = threads()
result = compute()
assert threads() == with_team and result == compute()
print(told, with_team - released)
"""


def test_a_thread_that_releases_its_team_computes_on_with_a_new_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True 1\n", "")
