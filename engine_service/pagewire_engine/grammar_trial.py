"""Tries in a process of its own whether a constraint can be compiled.

A constraint is somebody else's program for llguidance, and a hostile one may overflow the stack,
take all memory, or not come to an end: then it is the trial's process that dies. What has passed is
compiled once more in the engine.

`python -m pagewire_engine.grammar_trial` reads JSON lines: the vocabulary, then constraints. It
writes a line for each, and ends with its input.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any, NamedTuple

import orjson
import psutil

from pagewire.errors import (
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    error_from_code,
)
from pagewire.structured_output import FIELD, StructuredOutput

logger = logging.getLogger(__name__)

MAX_SECONDS = 2
MAX_BYTES = 512 << 20
# For one that neither ends nor computes.
_MOST_WAIT_S = 120.0
_NICENESS = 5
_STACK_BYTES = 1 << 20


class Passed(NamedTuple):
    """A constraint that can be compiled.

    Attributes:
        grammar: its `grammar_text`.
        num_bytes: of memory that it takes.
        growth: its `growth_of`.
    """

    grammar: str
    num_bytes: int
    growth: int | None


class GrammarTrial:
    """The engine's side: starts the process when it is first needed, and again where it has died.
    One thread at a time uses it; `close` may be called from any.

    Args:
        tokenizer_json: the model's.
        vocab_size: rows of the output embedding.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        vocabulary = {
            "tokenizer_json": tokenizer_json.decode(),
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
        }
        self._vocabulary = orjson.dumps(vocabulary)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._is_ready = False

    def start(self) -> None:
        """Starts the process, unless it runs; it is ready some time later."""
        with self._lock:
            if self._closed or (self._process is not None and self._process.poll() is None):
                return
            module = "pagewire_engine.grammar_trial"
            self._process = subprocess.Popen(
                # -P: see MultiProcessExecutor.
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A Ctrl-C is its parent's business.
                start_new_session=True,
            )
            self._is_ready = False
        self._send(self._vocabulary)

    def try_out(self, constraint: StructuredOutput) -> Passed:
        """Compiles a constraint there.

        Raises:
            InvalidArgumentError: it can't be compiled, or not within the bounds.
            InternalError: the process can't be started.
        """
        self.start()
        if not self._is_ready and self._receive() is None:
            raise InternalError("the process that tries constraints out did not start; see its log")
        self._is_ready = True
        self._send(orjson.dumps(asdict(constraint)))
        answer = self._receive()
        if answer is None:
            logger.warning("A constraint (%s) was more than its trial could take.", constraint.kind)
            raise InvalidArgumentError(
                f"{FIELD}.{constraint.kind}",
                f"takes more than {MAX_SECONDS} s of processor time or {MAX_BYTES >> 20} MiB of "
                "memory to compile, or is nested too deeply; simplify it",
            )
        if "grammar" in answer:
            return Passed(**answer)
        raise error_from_code(answer["code"], answer["message"], answer["field"])

    def close(self) -> None:
        """Ends the process. Safe to call twice."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _send(self, line: bytes) -> None:
        process = self._process
        try:
            if process is not None and process.stdin is not None:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has died: the answer that does not come says so

    def _receive(self) -> dict[str, Any] | None:
        process = self._process
        line = b""
        if process is not None and process.stdout is not None:
            end = threading.Timer(_MOST_WAIT_S, process.kill)
            end.start()
            line = process.stdout.readline()
            end.cancel()
        if not line.endswith(b"\n"):
            self._bury()
            return None
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def _bury(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until the input ends."""
    from pagewire_engine.grammars import (
        compiled,
        control_token_ids,
        grammar_text,
        growth_of,
        make_vocabulary,
        unique_places,
    )

    given = orjson.loads(requests.readline())
    vocabulary = make_vocabulary(
        given["tokenizer_json"].encode(), given["vocab_size"], given["eos_token_ids"]
    )
    control_tokens = control_token_ids(given["tokenizer_json"].encode())
    _limit_memory()
    _answer(answers, {"ready": True})
    for line in requests:
        _limit_time()
        _give_back_memory()
        before = psutil.Process().memory_info().rss
        try:
            fields = orjson.loads(line)
            constraint = StructuredOutput(**fields)
            grammar = grammar_text(constraint, control_tokens)
            matcher = compiled(constraint, grammar, vocabulary)
            unique_places(constraint)
            size = max(0, psutil.Process().memory_info().rss - before)
            growth = growth_of(constraint, grammar, vocabulary)
            answer: dict[str, Any] = Passed(grammar, size, growth)._asdict()
            del matcher
        except PagewireError as error:
            answer = {"code": error.code, "message": error.message, "field": error.field}
        except MemoryError:
            return
        except Exception as error:
            answer = {
                "code": ErrorCode.INVALID_ARGUMENT,
                "message": f"can't be compiled ({type(error).__name__})",
                "field": FIELD,
            }
        _answer(answers, answer)


def _answer(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(orjson.dumps(answer) + b"\n")
    answers.flush()


def _give_back_memory() -> None:
    """Lets the next constraint's memory show as growth, where the C library can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limit_memory() -> None:
    size = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, size + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """The system kills the process that takes longer for the next constraint."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + 1 + MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main() -> None:
    """Serves on a thread whose stack is smaller than any that compiles or matches in the engine."""
    os.nice(_NICENESS)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
