"""`engine-service`: one model, served to frontends."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from pagewire.collector import settle_collector
from pagewire.config import EngineConfig
from pagewire.descriptors import raise_descriptor_limit
from pagewire.errors import PagewireError
from pagewire.logs import configure_logging
from pagewire.process_end import end_process
from pagewire.service_name import Program
from pagewire.settings import (
    FAILURE,
    MISTAKE,
    describe_failure,
    failure_status,
    parse_settings,
)
from pagewire_engine.errors import StartupError, UnmetStartupError

# A thread that wants the interpreter waits this long for one that computes; Python's default of
# 5 ms would let a wire thread hold up a whole step.
SWITCH_INTERVAL_S = 0.001
_M_ARENA_MAX = -8  # of glibc's malloc.h
# Not 1 or 2: those say that it could not start, and starting it again would not help.
DEAD_ENGINE_STATUS = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the engine until SIGINT or SIGTERM.

    Returns:
        The exit status where it did not get as far as to serve: 2 when one of its settings is at
        fault, 1 when it can't start for another reason. Once it serves, its end is the process's:
        with 0 after a clean shutdown, with DEAD_ENGINE_STATUS where the engine died.
    """
    config = parse_settings(
        EngineConfig,
        argv,
        prog="engine-service",
        description="Serves one model to pagewire frontends: token ids in, token ids out.",
        positional=("model",),
    )
    if importlib.util.find_spec("torch") is None:
        return _fail("the engine needs torch: pip install 'pagewire[engine]'")
    configure_logging(config.log_level, config.log_format, Program.ENGINE)
    raise_descriptor_limit()
    # Handlers before the work: a Ctrl-C while weights load ends the process at once and quietly.
    stop, hurry = threading.Event(), threading.Event()
    loaded = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()
        if not loaded:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _share_one_arena()

    started = time.monotonic()
    try:
        # Late: `--help` must not wait for grpc and torch.
        from pagewire_engine.build import build_engine
        from pagewire_engine.service import EngineServer, check_addresses

        check_addresses(config)
        built = build_engine(config, lambda line: print(line, file=sys.stderr, flush=True))
        server = EngineServer(built, config)
        port = server.start()
        loaded = True
        settle_collector()
    except PagewireError as error:
        # Of a StartupError that names no field the text does.
        is_mistake = isinstance(error, StartupError) and not isinstance(error, UnmetStartupError)
        status = MISTAKE if is_mistake else failure_status(error, EngineConfig)
        return _fail(describe_failure(error, EngineConfig), status)
    except KeyboardInterrupt:
        print("engine-service: stopped while starting", file=sys.stderr, flush=True)
        return 0
    info = built.info
    print(
        f"engine-service is ready: {built.served_model_name} on {config.host}:{port}, "
        f"delta wire {server.stream_endpoint}, {info.architecture} in {info.dtype} on "
        f"{info.device}, {info.num_blocks} blocks of {info.block_size} tokens, "
        f"{time.monotonic() - started:.1f} s",
        flush=True,
    )
    # A plain wait() would not notice signals that arrive while another thread holds the lock.
    while not stop.wait(0.5):
        if server.died:
            print("engine-service: the engine died; the log says why", file=sys.stderr, flush=True)
            os._exit(DEAD_ENGINE_STATUS)
    print("engine-service: stopping", file=sys.stderr, flush=True)
    if config.drain_timeout_s:
        server.drain(config.drain_timeout_s, hurry)
    server.stop()
    return end_process(0)


def _share_one_arena() -> None:
    """One malloc arena for all threads: what one has freed, another uses (saves 25 MB)."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _fail(message: str, status: int = FAILURE) -> int:
    print(f"engine-service: error: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
