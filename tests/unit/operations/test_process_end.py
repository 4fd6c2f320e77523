"""The quick end of a program loses nothing that it said."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("status", [0, 3])
def test_all_that_was_printed_and_logged_is_out_and_the_status_is_kept(status: int) -> None:
    program = (
        "import logging, logging.handlers, sys\n"
        "from pagewire.process_end import end_process\n"
        "out = logging.StreamHandler(sys.stdout)\n"
        "logging.basicConfig(handlers=[logging.handlers.MemoryHandler(100, target=out)])\n"
        "print('printed')\n"
        "print('to stderr', end='', file=sys.stderr)\n"
        "logging.warning('logged')\n"
        f"end_process({status})\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert ended.stdout.split() == ["printed", "logged"]
    assert ended.stderr == "to stderr"
