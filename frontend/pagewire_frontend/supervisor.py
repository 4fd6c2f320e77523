"""The supervisor of `pagewire serve`: starts services, watches them, restarts what breaks.

It knows nothing of models or requests, and imports neither torch nor gradio. What it runs is told
by `Service`s; `serve_plan` makes the three of pagewire.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.logs import LogFormat
from pagewire.service_name import Program
from pagewire_frontend.child_process import ChildProcess, describe_end
from pagewire_frontend.service_output import ServiceOutput

# What a frontend may take to end when its grace period is over: it tells clients, engines and the
# collector of traces.
AFTER_GRACE_S = 10.0
_START_POLL_S = 0.15
_WATCH_POLL_S = 3.0
_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0
# A child that ran this long had recovered: its next crash starts a new series.
_SETTLED_S = 60.0
_MAX_FAILED_STARTS = 3
# make and `timeout` pass a signal on that this process was sent too: one request, not two.
_ONE_REQUEST_S = 1.0


@dataclass(frozen=True)
class Service:
    """A program to keep running.

    Attributes:
        name: how it is called in reports and before each of its lines.
        program: which it is, for lines as JSON.
        command: path and arguments.
        environment: all of its environment.
        is_ready: whether it serves; asked after each start until it says yes.
        stalled_s: since when it makes no progress, in seconds; 0 while it does. An exception
            means that it did not answer.
        stall_timeout_s: it is killed and restarted after so long without progress or answer.
        after: services that it leans on: they must have been ready once before it is started, and
            are stopped only when it has ended.
    """

    name: str
    program: Program
    command: Sequence[str]
    environment: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    stalled_s: Callable[[], Awaitable[float]]
    stall_timeout_s: float
    after: Sequence[str] = ()


class StartFailure(Exception):
    """A service could not be started at all; a restart would not help."""

    def __init__(self, service: str, status: int) -> None:
        super().__init__(f"{service} {describe_end(status)} before it was ready")
        self.status = status


@dataclass
class _State:
    """What the supervisor remembers of a service."""

    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    child: ChildProcess | None = None
    restarts: int = 0
    crashed_at: float | None = None


class Supervisor:
    """Runs services until it is told to stop, or one can't be started."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        ready_line: str,
        shutdown_timeout_s: float = 10.0,
        program: Program = Program.SUPERVISOR,
        log_format: LogFormat = "text",
    ) -> None:
        """
        Args:
            services: in the order in which they are started.
            ready_line: printed once when all of them are ready for the first time.
            shutdown_timeout_s: how long each may take to end before it is killed.
            program: which it is itself.
            log_format: of what it prints.
        """
        self._services = list(services)
        self._ready_line = ready_line
        self._shutdown_timeout_s = shutdown_timeout_s
        self._states = {service.name: _State() for service in services}
        self._output = ServiceOutput(
            log_format, {service.name: service.program for service in services}, program
        )
        self._announced = False
        self._asked_to_stop_at = 0.0
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keeps the services running until SIGINT, SIGTERM or SIGHUP, then ends them.

        Raises:
            StartFailure: a service ended before it was ready; the others were stopped.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        keepers = [asyncio.create_task(self._keep(service)) for service in self._services]
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in keepers if task.done()]
            self._stopping.set()
            await self._stop_children()
            for failure in failures:
                if failure is not None:
                    raise failure
        finally:
            for state in self._states.values():
                if state.child is not None:
                    state.child.kill()
            for task in [stop, *keepers]:
                task.cancel()
            await asyncio.gather(stop, *keepers, return_exceptions=True)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._stopping.is_set():
            if now - self._asked_to_stop_at < _ONE_REQUEST_S:
                return
            self._output.report("a second signal: killing what still runs")
            for state in self._states.values():
                if state.child is not None:
                    state.child.kill()
            return
        self._asked_to_stop_at = now
        self._output.report(f"{signal.Signals(number).name}: shutting down")
        self._stopping.set()

    async def _keep(self, service: Service) -> None:
        """Starts a service, and starts it again whenever it ends, until the supervisor stops."""
        state = self._states[service.name]
        for name in service.after:
            await self._states[name].was_ready.wait()
        failures = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            child = state.child = await ChildProcess.start(
                service.command, service.environment, self._writer(service.name)
            )
            watch = asyncio.create_task(self._watch(service, child))
            try:
                status = await child.wait()
            finally:
                watch.cancel()
            if self._stopping.is_set():
                return
            if not state.was_ready.is_set() and (status >= 0 or failures + 1 >= _MAX_FAILED_STARTS):
                raise StartFailure(service.name, status)
            state.crashed_at = time.monotonic()
            failures = 0 if state.crashed_at - started_at > _SETTLED_S else failures
            await self._pause(service.name, child, status, failures)
            failures += 1
            state.restarts += 1

    async def _pause(self, name: str, child: ChildProcess, status: int, failures: int) -> None:
        """Reports a crash and waits before the restart, longer after each failure in a row."""
        delay = min(_FIRST_BACKOFF_S * 2**failures, _LAST_BACKOFF_S)
        self._output.report(
            f"{name} (pid {child.pid}) {describe_end(status)}; restart in {delay:g} s"
        )
        for line in list(child.tail)[-5:]:
            self._output.report(f"  its last words: {line}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    async def _watch(self, service: Service, child: ChildProcess) -> None:
        """Announces that a child is ready, then kills it if it is stuck."""
        state = self._states[service.name]
        while not await service.is_ready():  # noqa: ASYNC110  # another process: nothing to wait on
            await asyncio.sleep(_START_POLL_S)
        state.was_ready.set()
        if state.crashed_at is not None:
            lapse = time.monotonic() - state.crashed_at
            self._output.report(f"{service.name} is ready again after {lapse:.1f} s")
            state.crashed_at = None
        self._announce()
        silent_polls, answered_at = 0, time.monotonic()
        poll_s = min(_WATCH_POLL_S, service.stall_timeout_s / 4)
        while True:
            await asyncio.sleep(poll_s)
            try:
                stalled_s = await service.stalled_s()
                silent_polls, answered_at = 0, time.monotonic()
            except Exception:
                # Not by the clock alone: after a suspended laptop wakes, all were silent for long.
                silent_polls += 1
                stalled_s = time.monotonic() - answered_at if silent_polls >= 3 else 0.0
            if stalled_s > service.stall_timeout_s:
                self._output.report(f"{service.name} is stuck since {stalled_s:.0f} s: killing it")
                child.kill()
                return

    def _announce(self) -> None:
        if not self._announced and all(s.was_ready.is_set() for s in self._states.values()):
            self._announced = True
            self._output.announce(self._ready_line)

    async def _stop_children(self) -> None:
        """Ends the children at once, but each only when those that lean on it have ended."""
        ended = {service.name: asyncio.Event() for service in self._services}

        async def stop(service: Service) -> None:
            for other in self._services:
                if service.name in other.after:
                    await ended[other.name].wait()
            child = self._states[service.name].child
            if child is not None:
                await self._stop_child(service.name, child)
            ended[service.name].set()

        await asyncio.gather(*(stop(service) for service in self._services))

    async def _stop_child(self, name: str, child: ChildProcess) -> None:
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), self._shutdown_timeout_s)
        except TimeoutError:
            self._output.report(f"{name} did not end in {self._shutdown_timeout_s:g} s: kill")
            child.kill()
            await child.wait()

    def _writer(self, name: str) -> Callable[[str, bool], None]:
        return functools.partial(self._output.service_line, name)
