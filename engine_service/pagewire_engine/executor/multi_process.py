"""The worker in a process of its own, reached through a socket pair by plain data alone."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from typing import Any

import orjson

from pagewire.config import EngineConfig
from pagewire.errors import PagewireError, UnavailableError, error_from_code
from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.executor.frames import FrameKind, receive_frame, send_frame
from pagewire_engine.executor.plain_data import (
    decode_description,
    decode_info,
    decode_memory,
    decode_result,
    encode,
)
from pagewire_engine.model_files import ModelFiles
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo

logger = logging.getLogger(__name__)

_EXIT_WAIT_S = 5.0


class WorkerDiedError(UnavailableError):
    """The worker's process is gone; the engine has to be started again."""


class _Questions:
    """A connection on which one question after another is asked, and answered."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[_Questions, socket.socket]:
        """With the other end of its connection."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def ask(self, kind: FrameKind, data: bytes) -> tuple[FrameKind, bytes]:
        """Waits for the answer. Raises EOFError or OSError where there is nobody."""
        with self._asking:
            send_frame(self._connection, kind, data)
            return receive_frame(self._connection)

    def close(self) -> None:
        self._connection.close()


class MultiProcessExecutor:
    """Implements Executor with one spawned worker.

    The child is a fresh interpreter: nothing is forked, and nothing is pickled.
    """

    def __init__(self, config: EngineConfig, model: ModelFiles) -> None:
        """Starts the worker and waits until the model is loaded.

        Raises:
            PagewireError: the model, its files or the settings can't be served.
            WorkerDiedError: the worker ended before it was ready.
        """
        # Adapters have a connection of their own: steps don't wait while one is read.
        self._steps, for_steps = _Questions.pair()
        self._adapters, for_adapters = _Questions.pair()
        module = "pagewire_engine.executor.worker_process"
        with for_steps, for_adapters:
            theirs = [for_steps.fileno(), for_adapters.fileno()]
            self._process = subprocess.Popen(
                # -P: a folder called `kernels` in the current directory must not be importable
                # (transformers looks for a package of that name).
                [sys.executable, "-P", "-m", module, *map(str, theirs)],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
            )
        try:
            setup = {"config": config.model_dump(mode="json"), "files": _files(model)}
            self._info = decode_info(self._ask(self._steps, FrameKind.INFO, encode(setup)))
        except BaseException:
            self.shutdown()
            raise

    @property
    def worker_pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def info(self) -> WorkerInfo:
        return self._info

    @property
    def launches_ahead(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> PendingStep:
        return LandedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        return decode_result(self._ask(self._steps, FrameKind.PLAN, encode(plan)))

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription:
        """See Executor. Who asks about other adapters waits meanwhile; steps don't."""
        asked = {"number": number, "path": folder.path, "root": folder.root}
        return decode_description(self._ask(self._adapters, FrameKind.LOAD_ADAPTER, encode(asked)))

    def drop_adapter(self, number: int) -> None:
        self._ask(self._adapters, FrameKind.DROP_ADAPTER, encode({"number": number}))

    def adapter_memory(self) -> AdapterMemory:
        return decode_memory(self._ask(self._adapters, FrameKind.ADAPTER_MEMORY, b""))

    def shutdown(self) -> None:
        self._steps.close()
        self._adapters.close()
        try:
            self._process.wait(timeout=_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the worker did not end by itself; it is killed")
            self._process.kill()
            self._process.wait()

    def _ask(self, questions: _Questions, kind: FrameKind, data: bytes) -> bytes:
        try:
            answer_kind, answer = questions.ask(kind, data)
        except (EOFError, OSError) as error:
            raise WorkerDiedError(self._last_words()) from error
        if answer_kind is FrameKind.ERROR:
            raise _error(orjson.loads(answer))
        return answer

    def _last_words(self) -> str:
        try:
            code: int | None = self._process.wait(timeout=_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            code = None
        how = f"ended with exit code {code}" if code is not None else "closed its connection"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return (
            f"the worker process {how}; restart the engine (out of memory is the usual cause: "
            "lower kv_cache_memory or max_num_batched_tokens)"
        )


def _files(model: ModelFiles) -> dict[str, Any]:
    return {
        "path": str(model.path),
        "gguf": str(model.gguf) if model.gguf is not None else None,
        "name": model.name,
    }


def _error(fields: dict[str, Any]) -> PagewireError:
    return error_from_code(fields["code"], fields["message"], fields["field"])
