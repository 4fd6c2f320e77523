"""One child of the supervisor: started so that it can't outlive it, its output passed through."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
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
        self,
        process: subprocess.Popen[bytes],
        outputs: Sequence[tuple[asyncio.StreamReader, asyncio.ReadTransport]],
        write_line: Callable[[str, bool], None],
    ) -> None:
        self._process = process
        self._write_line = write_line
        self._reaped = False
        self.pid = process.pid
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pumps = [
            asyncio.create_task(self._pump(stream, is_error=index == 1))
            for index, (stream, _) in enumerate(outputs)
        ]
        self._pipes = [pipe for _, pipe in outputs]
        self._ended = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._await_end, args=[self._ended.get_loop()], daemon=True).start()

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
        # Not asyncio's own subprocess: its wait() lasts until the pipes are closed, and a worker
        # that a crashed engine leaves behind holds them open.
        process = subprocess.Popen(  # noqa: ASYNC220  # a fork and an exec: they don't block
            [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        loop = asyncio.get_running_loop()
        outputs: list[tuple[asyncio.StreamReader, asyncio.ReadTransport]] = []
        for pipe in (process.stdout, process.stderr):
            stream = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(
                functools.partial(asyncio.StreamReaderProtocol, stream), pipe
            )
            outputs.append((stream, transport))
        return cls(process, outputs, write_line)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(self._ended.set_result, status)

    async def wait(self) -> int:
        """Waits for its end; the exit status, or minus the signal that killed it."""
        status: int = await asyncio.shield(self._ended)
        self.kill()  # what it started itself and left behind
        self._reaped = True
        # What it wrote last is worth reading, but a grandchild in another session might keep the
        # pipes open.
        await asyncio.wait(self._pumps, timeout=1.0)
        for pump in self._pumps:
            pump.cancel()
        for pipe in self._pipes:
            pipe.close()
        return status

    def terminate(self) -> None:
        """Asks it to end."""
        self._process.send_signal(signal.SIGTERM)  # which checks that it still runs

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
