"""The end of a program that has closed all it held."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Ends this process at once, with all it has printed and logged.

    Where torch or Gradio was imported, Python takes seconds to free a heap piece by piece that the
    system frees in a moment. Handlers of `atexit` do not run: for programs that need none.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(status)
