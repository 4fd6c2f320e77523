"""A worker on its own: `python -m pagewire_engine.executor.worker_process FD FD`, started by
MultiProcessExecutor. It ends when its parent closes the first socket, or dies."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import orjson

from pagewire.config import EngineConfig
from pagewire.errors import ErrorCode, PagewireError
from pagewire.logs import configure_logging
from pagewire.service_name import Program
from pagewire_engine.adapters.description import AdapterFolder
from pagewire_engine.executor.frames import FrameKind, receive_frame, send_frame
from pagewire_engine.executor.plain_data import decode_plan, encode
from pagewire_engine.model_files import ModelFiles
from pagewire_engine.worker.encoder_worker import EncoderWorker
from pagewire_engine.worker.load_worker import adapters_of, load_worker
from pagewire_engine.worker.worker import Worker

logger = logging.getLogger(__name__)


def main() -> None:
    """Loads the model that the first frame names, then runs a plan at a time. What is asked about
    adapters comes by the second socket, and is done beside the steps."""
    steps, adapters = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with steps, adapters:
        try:
            serve(steps, adapters)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def serve(connection: socket.socket, adapters: socket.socket) -> None:
    """Answers frames until the other side closes."""
    _, data = receive_frame(connection)
    setup = orjson.loads(data)
    config = EngineConfig(**setup["config"])
    configure_logging(config.log_level, config.log_format, Program.ENGINE)
    try:
        worker = load_worker(config, _files(setup["files"]))
    except Exception as error:
        send_frame(connection, FrameKind.ERROR, encode(_describe(error)))
        return
    threading.Thread(target=_serve_adapters, args=(worker, adapters), daemon=True).start()
    send_frame(connection, FrameKind.INFO, encode(worker.info()))
    _answer_all(worker, connection)


def _serve_adapters(worker: Worker | EncoderWorker, connection: socket.socket) -> None:
    try:
        _answer_all(worker, connection)
    except (EOFError, OSError):
        return  # the steps' socket says so too


def _answer_all(worker: Worker | EncoderWorker, connection: socket.socket) -> None:
    while True:
        kind, data = receive_frame(connection)
        try:
            result = _answer(worker, kind, data)
        except Exception as error:
            if kind is FrameKind.PLAN:
                logger.exception("a step failed")
            send_frame(connection, FrameKind.ERROR, encode(_describe(error)))
        else:
            send_frame(connection, FrameKind.RESULT, result)


def _answer(worker: Worker | EncoderWorker, kind: FrameKind, data: bytes) -> bytes:
    if kind is FrameKind.PLAN:
        return encode(worker.execute(decode_plan(data)))
    if kind is FrameKind.ADAPTER_MEMORY:
        return encode(adapters_of(worker).memory())
    asked = orjson.loads(data)
    if kind is FrameKind.DROP_ADAPTER:
        adapters_of(worker).drop(asked["number"])
        return encode({})
    folder = AdapterFolder(asked["path"], asked["root"])
    return encode(adapters_of(worker).load(asked["number"], folder))


def _files(fields: dict[str, Any]) -> ModelFiles:
    gguf = fields["gguf"]
    return ModelFiles(Path(fields["path"]), Path(gguf) if gguf else None, fields["name"])


def _describe(error: Exception) -> dict[str, Any]:
    if isinstance(error, PagewireError):
        return {"code": int(error.code), "message": error.message, "field": error.field}
    return {
        "code": int(ErrorCode.INTERNAL),
        "message": f"{type(error).__name__}: {error}",
        "field": "",
    }


if __name__ == "__main__":
    main()
