"""`pagewire-frontend`: text over gRPC and HTTP in front of an engine."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pagewire.collector import settle_collector
from pagewire.descriptors import raise_descriptor_limit
from pagewire.errors import PagewireError
from pagewire.logs import configure_logging
from pagewire.process_end import end_process
from pagewire.service_name import Program
from pagewire.settings import SettingsError, describe_failure, failure_status, parse_settings
from pagewire_frontend.config import FrontendConfig
from pagewire_frontend.supervisor import StartFailure
from pagewire_frontend.workers import Worker, run_workers

_PROG = "pagewire-frontend"
_THREADS = "frontend-work"
_MOST_WAIT_FOR_THREADS_S = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the frontend until SIGINT or SIGTERM. A second signal ends it at once."""
    config = parse_settings(
        FrontendConfig,
        argv,
        prog=_PROG,
        description="Serves the gRPC and the OpenAI-compatible API in front of engines.",
        positional=["engine"],
    )
    configure_logging(config.log_level, config.log_format, Program.FRONTEND)
    raise_descriptor_limit()
    worker = Worker.from_environment()
    try:
        if config.workers > 1 and worker is None:
            run_workers(config)
            return
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            threads = ThreadPoolExecutor(thread_name_prefix=_THREADS)
            runner.get_loop().set_default_executor(threads)
            runner.run(_serve(config, worker))
            _leave(threads)
    except StartFailure as failure:
        # Its own words have been shown already, as it said them.
        print(f"{_PROG}: error: {failure}; its lines above say why", file=sys.stderr)
        raise SystemExit(failure.status if failure.status > 0 else 1) from None
    except (OSError, SettingsError, PagewireError) as error:
        print(f"{_PROG}: error: {describe_failure(error, FrontendConfig)}", file=sys.stderr)
        raise SystemExit(failure_status(error, FrontendConfig)) from None


def _leave(threads: ThreadPoolExecutor) -> None:
    """Ends the process where threads are still at work, which none can be told to stop: whoever
    they worked for has had an answer."""
    threads.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + _MOST_WAIT_FOR_THREADS_S
    while any(thread.name.startswith(_THREADS) for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            end_process(0)
        time.sleep(0.01)


async def _serve(config: FrontendConfig, worker: Worker | None) -> None:
    from pagewire_frontend.server import FrontendServer, describe_addresses

    server = FrontendServer(config, worker=worker)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            # Asked twice: whoever waits does not want to.
            sys.stderr.flush()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await server.start(wait_for_engine=False)
    _say(f"waiting for {config.engines}; answering on {describe_addresses(server)}")
    stopped = asyncio.create_task(stop.wait())
    connected = asyncio.create_task(server.wait_until_connected())
    try:
        await asyncio.wait({stopped, connected}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            connected.result()
            settle_collector()
            _say(f"{_PROG} is ready: {describe_addresses(server)}")
            await stopped
            _say(f"stopping: running requests get {config.grace_period_s:g} s")
    finally:
        connected.cancel()
        await server.stop()


def _say(text: str) -> None:
    print(text, flush=True)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop


if __name__ == "__main__":
    main()
