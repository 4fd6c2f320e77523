"""One child of the supervisor: started so that it can't outlive it, its output passed through."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

# Runs before the child's own program, in the child: asks the kernel (Linux) to kill it when the
# supervisor dies, whatever it dies of, then becomes the program.
_GUARD = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
except AttributeError:
    pass
if os.getppid() != int(sys.argv[1]):  # the supervisor died before the request
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_TAIL_LINES = 20


class ChildProcess:
    """A running child.

    Attributes:
        pid: its process id, which is its process group's too.
        tail: the last lines it wrote to standard error.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, write_line: Callable[[str, bool], None]
    ) -> None:
        self._process = process
        self._write_line = write_line
        self._reaped = False
        self.pid = process.pid
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        assert process.stdout is not None
        assert process.stderr is not None
        self._pumps = [
            asyncio.create_task(self._pump(process.stdout, is_error=False)),
            asyncio.create_task(self._pump(process.stderr, is_error=True)),
        ]

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        write_line: Callable[[str, bool], None],
    ) -> ChildProcess:
        """Starts `command`, in a session of its own.

        A terminal's Ctrl-C then reaches the supervisor alone, which ends its children in order.

        Args:
            command: the program's path and its arguments.
            environment: all of its environment.
            write_line: called with each line it writes, and whether to standard error.
        """
        guarded = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]
        process = await asyncio.create_subprocess_exec(
            *guarded,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        return cls(process, write_line)

    async def wait(self) -> int:
        """Waits for its end; the exit status, or minus the signal that killed it."""
        status = await self._process.wait()
        self.kill()  # what it started itself and left behind
        self._reaped = True
        # A grandchild in another session might keep the pipes open.
        await asyncio.wait(self._pumps, timeout=1.0)
        for pump in self._pumps:
            pump.cancel()
        return status

    def terminate(self) -> None:
        """Asks it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it and everything in its process group."""
        if self._reaped:  # another process may have its id by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _pump(self, stream: asyncio.StreamReader, *, is_error: bool) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pending = ""
        while chunk := await stream.read(65536):
            # A progress bar's carriage returns end lines too.
            *lines, pending = (pending + decoder.decode(chunk)).replace("\r", "\n").split("\n")
            for line in lines:
                self._take(line, is_error)
        self._take(pending, is_error)

    def _take(self, line: str, is_error: bool) -> None:
        if not line.strip():
            return
        if is_error:
            self.tail.append(line)
        self._write_line(line, is_error)


def describe_end(status: int) -> str:
    """`ended with status 3` or `was killed by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
