"""The supervisor's promises, with small programs in place of engine and frontend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pagewire.service_name import Program
from pagewire_frontend import supervisor as supervisor_module
from pagewire_frontend.supervisor import Service, StartFailure, Supervisor

# Says that it is up by making a file, notes its end in another, and ends when asked.
WELL_BEHAVED = """
import pathlib, signal, sys, time
up, log, name = sys.argv[1:]
def end(*_):
    with open(log, "a") as file:
        file.write(name + " ended\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("hello from", name, flush=True)  # before it is up: it may be ended at once then
pathlib.Path(up).write_text(str(__import__("os").getpid()))
while True:
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_START_POLL_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_WATCH_POLL_S", 0.02)
    monkeypatch.setattr(supervisor_module, "_FIRST_BACKOFF_S", 0.02)


async def never_stalled() -> float:
    return 0.0


def service(
    folder: Path,
    name: str,
    program: str = WELL_BEHAVED,
    *,
    stalled_s: Callable[[], Awaitable[float]] = never_stalled,
    after: tuple[str, ...] = (),
) -> Service:
    up = folder / f"{name}.up"

    async def is_ready() -> bool:
        return up.exists() and up.read_text() != ""

    return Service(
        name=name,
        program=Program.ENGINE,
        command=[sys.executable, "-c", program, str(up), str(folder / "log"), name],
        environment=os.environ,
        is_ready=is_ready,
        stalled_s=stalled_s,
        stall_timeout_s=5.0,
        after=after,
    )


def supervise(*services: Service, shutdown_timeout_s: float = 20.0) -> Supervisor:
    return Supervisor(services, ready_line="all is ready", shutdown_timeout_s=shutdown_timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # other processes: nothing to wait on
            await asyncio.sleep(0.01)


class Output:
    """What the supervisor has printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = ""
        self.err = ""

    def read(self) -> Output:
        captured = self._capsys.readouterr()
        self.out += captured.out
        self.err += captured.err
        return self


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_children_that_lean_on_none_of_each_other_end_at_once(
    tmp_path: Path, output: Output
) -> None:
    # It ends only when the others were asked to.
    sociable = WELL_BEHAVED.replace(
        "    with open",
        "    pathlib.Path(up + '.asked').touch()\n"
        "    others = [pathlib.Path(up).with_name(n + '.up.asked') for n in ('page', 'other')]\n"
        "    while not all(other.exists() for other in others):\n"
        "        time.sleep(0.01)\n"
        "    with open",
    )
    services = [
        service(tmp_path, "engine"),
        service(tmp_path, "front", sociable, after=("engine",)),
        service(tmp_path, "page", sociable),
        service(tmp_path, "other", sociable),
    ]
    task = asyncio.create_task(supervise(*services, shutdown_timeout_s=20.0).run())
    await until(lambda: "all is ready" in output.read().out)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert "did not end" not in output.read().err
    ends = (tmp_path / "log").read_text().splitlines()
    assert len(ends) == 4
    assert ends.index("front ended") < ends.index("engine ended")


async def test_children_start_in_order_and_are_ended_in_reverse(
    tmp_path: Path, output: Output
) -> None:
    task = asyncio.create_task(
        supervise(service(tmp_path, "engine"), service(tmp_path, "front", after=("engine",))).run()
    )
    await until(lambda: "all is ready" in output.read().out)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert (tmp_path / "log").read_text() == "front ended\nengine ended\n"
    assert "engine | hello from engine\n" in output.out
    assert "front  | hello from front\n" in output.out
    assert output.out.count("all is ready") == 1


async def test_a_killed_child_is_reported_and_started_again(tmp_path: Path, output: Output) -> None:
    task = asyncio.create_task(supervise(service(tmp_path, "engine")).run())
    await until(lambda: "all is ready" in output.read().out)
    first = int((tmp_path / "engine.up").read_text())
    (tmp_path / "engine.up").unlink()
    os.kill(first, signal.SIGKILL)
    await until(lambda: "engine is ready again after" in output.read().err)
    assert f"engine (pid {first}) was killed by SIGKILL; restart in 0.02 s" in output.err
    second = int((tmp_path / "engine.up").read_text())
    assert second != first
    os.kill(os.getpid(), signal.SIGINT)
    await task
    assert not is_alive(second)
    assert output.read().out.count("all is ready") == 1


async def test_a_crash_shows_the_last_words(tmp_path: Path, output: Output) -> None:
    program = (
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).write_text('up')\n"
        "time.sleep(0.1)\n"
        "sys.exit('out of luck')\n"
    )
    task = asyncio.create_task(supervise(service(tmp_path, "engine", program)).run())
    await until(lambda: output.read().err.count("its last words: out of luck") >= 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert "engine (pid" in output.err
    assert "ended with status 1; restart in 0.04 s" in output.err


async def test_a_child_that_cannot_start_stops_everything(tmp_path: Path, output: Output) -> None:
    broken = service(
        tmp_path, "engine", "import sys; print('no such model', file=sys.stderr); sys.exit(2)"
    )
    with pytest.raises(StartFailure) as failed:
        await supervise(service(tmp_path, "page"), broken).run()
    assert failed.value.status == 2
    assert output.read().err.count("no such model") == 1
    assert str(failed.value) == "engine ended with status 2 before it was ready"


async def test_a_child_killed_at_its_start_is_tried_three_times(
    tmp_path: Path, output: Output
) -> None:
    program = "import os; print('try', flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(StartFailure, match="killed by SIGKILL"):
        await supervise(service(tmp_path, "engine", program)).run()
    assert output.read().out.count("engine | try") == 3


async def test_a_stuck_child_is_killed_and_started_again(tmp_path: Path, output: Output) -> None:
    stalled = 0.0

    async def stalled_s() -> float:
        return stalled

    task = asyncio.create_task(supervise(service(tmp_path, "engine", stalled_s=stalled_s)).run())
    await until(lambda: "all is ready" in output.read().out)
    (tmp_path / "engine.up").unlink()
    stalled = 6.0
    await until(lambda: "engine is stuck since 6 s: killing it" in output.read().err)
    stalled = 0.0
    await until(lambda: "engine is ready again" in output.read().err)
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, output: Output) -> None:
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    task = asyncio.create_task(
        supervise(service(tmp_path, "engine", program), shutdown_timeout_s=0.1).run()
    )
    await until(lambda: "all is ready" in output.read().out)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert not is_alive(int((tmp_path / "engine.up").read_text()))
    assert "engine did not end in 0.1 s" in output.read().err


async def test_a_second_signal_kills_but_an_echo_of_the_first_does_not(
    tmp_path: Path, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).write_text('up')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(supervisor_module, "_ONE_REQUEST_S", 60.0)
    task = asyncio.create_task(
        supervise(service(tmp_path, "engine", program), shutdown_timeout_s=30).run()
    )
    await until(lambda: "all is ready" in output.read().out)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: "shutting down" in output.read().err)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    assert "second signal" not in output.read().err
    monkeypatch.setattr(supervisor_module, "_ONE_REQUEST_S", 0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert "a second signal: killing" in output.read().err


async def test_what_a_child_leaves_behind_is_killed_with_it(tmp_path: Path, output: Output) -> None:
    program = (
        "import pathlib, subprocess, sys, time\n"
        "worker = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(worker.pid))\n"
        "time.sleep(60)\n"
    )
    task = asyncio.create_task(supervise(service(tmp_path, "engine", program)).run())
    await until(lambda: "all is ready" in output.read().out)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    worker = int((tmp_path / "engine.up").read_text())
    await until(lambda: not is_alive(worker))


async def test_a_crash_is_noticed_though_an_orphan_holds_the_pipes_open(
    tmp_path: Path, output: Output
) -> None:
    program = (
        "import os, pathlib, subprocess, sys\n"
        "subprocess.Popen(['sleep', '20'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1]).write_text('up')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    task = asyncio.create_task(supervise(service(tmp_path, "engine", program)).run())
    await until(lambda: "was killed by SIGKILL" in output.read().err)
    os.kill(os.getpid(), signal.SIGTERM)
    await task


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from pagewire_frontend.child_process import ChildProcess\n"
        "async def main():\n"
        "    child = await ChildProcess.start(['/bin/sleep', '60'], os.environ, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
