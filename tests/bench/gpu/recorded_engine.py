"""`engine-service`, with the times at which its steps ended: told on request.

Usage: python -m tests.bench.gpu.recorded_engine [flags of engine-service]

Each line on standard input is answered by one line: a JSON list of seconds of the monotonic clock,
of the steps since the line before. It stops when its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from pagewire_engine import cli
from pagewire_engine.engine import Engine
from pagewire_engine.outputs import StepOutputs

_ended: list[float] = []
_step = Engine.step


def _recorded_step(engine: Engine) -> StepOutputs:
    outputs = _step(engine)
    _ended.append(time.monotonic())
    return outputs


def _answer() -> None:
    for _ in sys.stdin:
        count = len(_ended)
        print(json.dumps(_ended[:count]), flush=True)
        del _ended[:count]
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Engine.step = _recorded_step  # type: ignore[method-assign]
    threading.Thread(target=_answer, daemon=True).start()
    sys.exit(cli.main())
