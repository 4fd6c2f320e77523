"""`engine-service` itself, with what only a test can ask of it. Run as a program.

Variables of the environment:
    TEST_STEP_S: seconds that each step takes longer.
    TEST_POISON: TOKEN:LENGTH kills the process at the step that computes output LENGTH or a later
        one of a request with TOKEN in its prompt; TOKEN:LENGTH:hang lets that step never end.

SIGUSR1 cuts the connections of the delta wire, as a network would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from types import FrameType

from pagewire_engine import cli
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.executor.single_process import SingleProcessExecutor
from pagewire_engine.step import StepPlan
from pagewire_engine.token_stream import TokenStreams

STEP_VARIABLE = "TEST_STEP_S"
POISON_VARIABLE = "TEST_POISON"


class Poison:
    """Kills this process at a step, or lets it hang there.

    Args:
        spelling: as above, or nothing.
    """

    def __init__(self, spelling: str) -> None:
        token, length, kind, *_ = [*spelling.split(":"), "", ""]
        self._token = int(token) if token else None
        self._length = int(length or 0)
        self._hangs = kind == "hang"
        # Of each sequence that holds the token, how much is computed when it kills.
        self._deadly: dict[int, int] = {}

    def __call__(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            if self._token in new.prompt_token_ids:
                self._deadly[new.sequence_id] = len(new.prompt_token_ids) + self._length
        for entry in plan.scheduled:
            reach = entry.start + entry.num_tokens
            if reach >= self._deadly.get(entry.sequence_id, sys.maxsize):
                if self._hangs:
                    threading.Event().wait()
                os.kill(os.getpid(), signal.SIGKILL)


def slow_down_and_poison() -> None:
    """Puts both into the way of every step."""
    step_s = float(os.environ.get(STEP_VARIABLE, "0"))
    poison = Poison(os.environ.get(POISON_VARIABLE, ""))
    launch = SingleProcessExecutor.launch

    def launch_under_test(self: SingleProcessExecutor, plan: StepPlan) -> PendingStep:
        poison(plan)
        time.sleep(step_s)
        return launch(self, plan)

    SingleProcessExecutor.launch = launch_under_test  # type: ignore[method-assign]


def cut_on_signal() -> None:
    """Lets SIGUSR1 cut the delta wire."""
    streams: list[TokenStreams] = []
    start = TokenStreams.start

    def start_under_test(self: TokenStreams) -> None:
        streams.append(self)
        start(self)

    def cut(number: int, frame: FrameType | None) -> None:
        for each in streams:
            threading.Thread(target=cut_connections, args=[each.endpoint.advertised]).start()

    TokenStreams.start = start_under_test  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, cut)


def cut_connections(endpoint: str) -> None:
    """Shuts every connection down that this process has at its own endpoint."""
    address = endpoint.partition("://")[2]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                here = connection.getsockname()
                path = here if isinstance(here, str) else f"{here[0]}:{here[1]}"
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if path == address and not listens:
                    connection.shutdown(socket.SHUT_RDWR)


def main() -> int:
    slow_down_and_poison()
    cut_on_signal()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
