"""The engine's control calls: they check, register the stream, and leave a note in the loop's
inbox."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc

from pagewire import __version__
from pagewire.certificates import RenewedTls
from pagewire.conversion import (
    beam_search_from_proto,
    pooling_info_to_proto,
    pooling_params_from_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
    tasks_to_proto,
)
from pagewire.errors import (
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from pagewire.outputs import FinishReason
from pagewire.sampling_params import SamplingParams
from pagewire.tracing import TraceHeaders, trace_headers
from pagewire.v1 import engine_pb2, engine_pb2_grpc
from pagewire_engine.adapters.service import AdapterService
from pagewire_engine.admission import open_sequences
from pagewire_engine.block_map import Snapshot
from pagewire_engine.build import BuiltEngine
from pagewire_engine.engine_loop import EngineLoop
from pagewire_engine.grammar_matcher import CompiledGrammar
from pagewire_engine.stats_message import delta_wire_message, stats_message, window_message
from pagewire_engine.structured_output import start_compiling
from pagewire_engine.submission import SequencePast, Submission
from pagewire_engine.token_stream import TokenStreams

TOKENIZER_CHUNK_BYTES = 64 * 1024
MAX_STATS_STREAMS = 8
# Submits that may wait for a constraint at a time.
MAX_COMPILE_WAITS = 64
# Loads and unloads of adapters at a time.
MAX_ADAPTER_CALLS = 8
_LOOK_INTERVAL_S = 0.25
_MIN_STATS_INTERVAL_S = 0.01
_MIN_WINDOW_INTERVAL_S = 0.1
# A look waits for the step that is under way; in a longer one the last look is told again.
_LOOK_TIMEOUT_S = 2.0
_ABORT_REASONS = {0: FinishReason.ABORT, 1: FinishReason.STOP, 3: FinishReason.ABORT}


class EngineServicer(engine_pb2_grpc.EngineServicer):  # type: ignore[misc]  # generated, untyped
    """Implements pagewire.v1.Engine.

    Args:
        built: the engine and what it serves.
        loop: the thread that runs it.
        streams: the delta wire.
        adapters: loads and unloads them.
        seed: of the seeds given to requests without one.
        tls: what the control API shows; None: it has no TLS.
        traces: whether to keep which trace a request belongs to.
    """

    def __init__(
        self,
        built: BuiltEngine,
        loop: EngineLoop,
        streams: TokenStreams,
        adapters: AdapterService,
        seed: int,
        tls: RenewedTls | None = None,
        *,
        traces: bool = False,
    ) -> None:
        self._traces = traces
        self._tls = tls
        self._built = built
        self._loop = loop
        self._streams = streams
        self._adapters = adapters
        self._admission = built.admission(seed)
        self._tokenizer_sha256 = tokenizer_hash(built.tokenizer_files)
        # An Abort must not slip between a stream's registration and its way into the inbox.
        self._submit_lock = threading.Lock()
        self._stats_slots = threading.BoundedSemaphore(MAX_STATS_STREAMS)
        self._adapter_slots = threading.BoundedSemaphore(MAX_ADAPTER_CALLS)
        self._compile_slots = threading.BoundedSemaphore(MAX_COMPILE_WAITS)
        self._stopping = threading.Event()
        self._last_window: tuple[Snapshot | None, engine_pb2.EngineWindow]
        self._last_window = None, engine_pb2.EngineWindow()
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether new requests are turned away."""
        return self._draining

    def drain(self) -> None:
        """Turns new requests away from now on, and lets the frontends know."""
        self._draining = True
        self._streams.beat()

    def stop(self) -> None:
        """Ends the calls that wait."""
        self._draining = True
        self._stopping.set()

    def Attach(
        self, request: engine_pb2.AttachRequest, context: grpc.ServicerContext
    ) -> engine_pb2.AttachResponse:
        if request.HasField("session_id") != request.HasField("secret"):
            raise InvalidArgumentError("secret", "set both session_id and secret, or neither")
        streams = self._streams
        session, resumed = streams.sessions.attach(request.session_id, request.secret)
        response = engine_pb2.AttachResponse(
            session_id=session.session_id,
            secret=session.secret,
            epoch=streams.epoch,
            stream_endpoint=streams.endpoint.advertised,
            heartbeat_interval_ms=int(streams.heartbeat_interval_s * 1000),
            session_timeout_ms=int(streams.sessions.session_timeout_s * 1000),
            resumed=resumed,
            draining=self._draining,
        )
        if streams.endpoint.curve_public_key is not None:
            response.curve_server_key = streams.endpoint.curve_public_key
        return response

    def Detach(
        self, request: engine_pb2.DetachRequest, context: grpc.ServicerContext
    ) -> engine_pb2.DetachResponse:
        with self._submit_lock:
            self._streams.sessions.detach(request.session_id, request.secret)
        return engine_pb2.DetachResponse()

    def Submit(
        self, request: engine_pb2.SubmitRequest, context: grpc.ServicerContext
    ) -> engine_pb2.SubmitResponse:
        if self._draining:
            raise UnavailableError(
                "takes no new requests: it drains", field="engine", retry_after_s=1.0
            )
        if request.stream < 1:
            raise InvalidArgumentError("stream", "numbers start at 1")
        submission = self._admitted(request)
        compiling = start_compiling(self._built.grammars, submission)
        if compiling is not None:
            submission = replace(submission, grammar=self._compiled(compiling, context))
        with self._submit_lock:
            if not context.is_active():
                # Cancelled: the Abort that followed may have been handled already.
                raise RequestCancelledError("the call was cancelled")
            stream, new = self._streams.sessions.open_stream(
                request.session_id,
                request.stream,
                request.request_id,
                open_sequences(submission),
                submission.sampling_params.seed or 0,
            )
            if new:
                stream.trace_headers = self._trace_headers(context)
                try:
                    stream.adapter_version = self._adapters.hand_over(
                        replace(submission, request_id=stream.engine_id),
                        request.adapter,
                        request.adapter_version,
                        self._loop.submit,
                    )
                except BaseException:
                    self._streams.sessions.withdraw(stream)
                    raise
                if not stream.live:
                    # The session timed out in between.
                    self._loop.abort(stream.engine_id)
        return engine_pb2.SubmitResponse(seed=stream.seed, adapter_version=stream.adapter_version)

    def _trace_headers(self, context: grpc.ServicerContext) -> TraceHeaders:
        if not self._traces:
            return ()
        return tuple(trace_headers(context.invocation_metadata() or ()).items())

    def _admitted(self, request: engine_pb2.SubmitRequest) -> Submission:
        prompt = list(request.prompt_token_ids)
        common: dict[str, Any] = {
            "tenant": request.tenant,
            "priority": request.priority,
            "past": [_past_from_proto(entry) for entry in request.past],
            "resubmission": request.resubmission,
        }
        if request.WhichOneof("decoding") == "pooling_params":
            params = pooling_params_from_proto(request.pooling_params)
            return self._admission.admit_pooling(request.request_id, prompt, params, **common)
        return self._admission.admit(request.request_id, prompt, self._params(request), **common)

    def _compiled(
        self, compiling: Future[CompiledGrammar], context: grpc.ServicerContext
    ) -> CompiledGrammar:
        """Waits for a request's constraint, as long as its caller does. Calls that wait hold a
        thread each, and leave enough of them to all other calls."""
        if not self._compile_slots.acquire(blocking=False):
            raise ResourceExhaustedError(
                f"{MAX_COMPILE_WAITS} requests wait for their constraints to be compiled, the most "
                "at a time; try again later",
                field="structured_output",
                retry_after_s=1.0,
            )
        try:
            while context.is_active():
                if wait([compiling], _LOOK_INTERVAL_S).done:
                    return compiling.result()
        finally:
            self._compile_slots.release()
        raise RequestCancelledError("the call was cancelled")

    def Abort(
        self, request: engine_pb2.AbortRequest, context: grpc.ServicerContext
    ) -> engine_pb2.AbortResponse:
        reason = _ABORT_REASONS.get(request.reason)
        if reason is None:
            raise InvalidArgumentError("reason", "must be STOP or ABORT")
        number = request.stream if request.HasField("stream") else None
        whole = not request.HasField("sequence")
        with self._submit_lock:
            if not context.is_active():
                # Its caller may have called again, and submitted again since.
                raise RequestCancelledError("the call was cancelled")
            sessions = self._streams.sessions
            find = sessions.dismiss if whole else sessions.find
            stream = find(request.session_id, request.request_id, number)
            if stream is None:
                return engine_pb2.AbortResponse()
            if whole:
                self._loop.abort(stream.engine_id, None, reason)
            elif request.sequence in stream.logs:
                self._loop.abort(stream.engine_id, request.sequence, reason)
        return engine_pb2.AbortResponse()

    def Resume(
        self, request: engine_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> engine_pb2.ResumeResponse:
        self._streams.resume(request.session_id)
        return engine_pb2.ResumeResponse()

    def Drain(
        self, request: engine_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> engine_pb2.DrainResponse:
        timeout_s = request.timeout_s
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise InvalidArgumentError("timeout_s", "must be seconds, 0 or above")
        remaining = context.time_remaining()
        if remaining is not None:
            timeout_s = min(timeout_s, remaining)
        self.drain()
        return engine_pb2.DrainResponse(unfinished=self._loop.drain(timeout_s))

    def GetModelInfo(
        self, request: engine_pb2.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> engine_pb2.GetModelInfoResponse:
        built, info = self._built, self._built.info
        return engine_pb2.GetModelInfoResponse(
            epoch=self._streams.epoch,
            served_model_name=built.served_model_name,
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            eos_token_ids=built.eos_token_ids,
            default_sampling_params=sampling_params_to_proto(built.default_sampling_params),
            tokenizer_sha256=self._tokenizer_sha256,
            created=built.created,
            pagewire_version=__version__,
            adapter_limits=self._adapters.limits() if self._adapters.enabled else None,
            tasks=tasks_to_proto(built.tasks),
            pooling=None if built.pooling is None else pooling_info_to_proto(built.pooling),
            weights_sha256=built.weights_sha256,
        )

    def GetTokenizer(
        self, request: engine_pb2.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> Iterator[engine_pb2.GetTokenizerResponse]:
        files = self._built.tokenizer_files
        if request.adapter:
            files = self._adapters.files_of(request.adapter, request.adapter_version)
        for path, data in files.items():
            # An empty file is one empty chunk.
            for start in range(0, max(1, len(data)), TOKENIZER_CHUNK_BYTES):
                yield engine_pb2.GetTokenizerResponse(
                    path=path, data=data[start : start + TOKENIZER_CHUNK_BYTES]
                )

    def GetStats(
        self, request: engine_pb2.GetStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[engine_pb2.GetStatsResponse]:
        if request.interval_ms == 0 and not request.with_window:
            yield self._stats(with_window=False)
            return
        # Each such call keeps one of the server's threads; a look at the window waits for a step.
        if not self._stats_slots.acquire(blocking=False):
            raise ResourceExhaustedError(
                f"{MAX_STATS_STREAMS} others watch the statistics already, the most at a time; "
                "try again later, or ask once without with_window"
            )
        try:
            if request.interval_ms == 0:
                yield self._stats(request.with_window)
                return
            least_s = _MIN_WINDOW_INTERVAL_S if request.with_window else _MIN_STATS_INTERVAL_S
            interval_s = max(least_s, request.interval_ms / 1000)
            while context.is_active():
                yield self._stats(request.with_window)
                if self._stopping.wait(interval_s):
                    return
        finally:
            self._stats_slots.release()

    def LoadAdapter(
        self, request: engine_pb2.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> engine_pb2.LoadAdapterResponse:
        with self._adapter_slot():
            return self._adapters.load(request)

    def UnloadAdapter(
        self, request: engine_pb2.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> engine_pb2.UnloadAdapterResponse:
        with self._adapter_slot():
            return self._adapters.unload(
                request, lambda: context.is_active() and not self._stopping.is_set()
            )

    def ListAdapters(
        self, request: engine_pb2.ListAdaptersRequest, context: grpc.ServicerContext
    ) -> engine_pb2.ListAdaptersResponse:
        return self._adapters.list(request.unless_revision)

    def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: grpc.ServicerContext
    ) -> engine_pb2.ResetPrefixCacheResponse:
        return engine_pb2.ResetPrefixCacheResponse(num_blocks=self._loop.reset_prefix_cache())

    def _params(self, request: engine_pb2.SubmitRequest) -> SamplingParams:
        if request.WhichOneof("decoding") == "beam_search":
            return beam_search_from_proto(request.beam_search)
        return sampling_params_from_proto(
            request.sampling_params, self._built.default_sampling_params
        )

    @contextmanager
    def _adapter_slot(self) -> Iterator[None]:
        """Calls that load or unload hold a thread each, and leave enough of them to all others."""
        if not self._adapter_slots.acquire(blocking=False):
            raise ResourceExhaustedError(
                f"{MAX_ADAPTER_CALLS} adapters are being loaded or unloaded, the most at a time; "
                "try again later",
                retry_after_s=1.0,
            )
        try:
            yield
        finally:
            self._adapter_slots.release()

    def _stats(self, with_window: bool) -> engine_pb2.GetStatsResponse:
        snapshot = self._loop.look(_LOOK_TIMEOUT_S) if with_window else None
        message = stats_message(
            self._loop.stats(),
            epoch=self._streams.epoch,
            num_sessions=len(self._streams.sessions),
            adapters=self._adapters.stats(),
            delta_wire=delta_wire_message(self._streams.frames),
            tls_certificate_expires_at=0.0 if self._tls is None else self._tls.current().expires_at,
        )
        if snapshot is not None:
            message.window.CopyFrom(self._window(snapshot))
        return message

    def _window(self, snapshot: Snapshot) -> engine_pb2.EngineWindow:
        """The snapshot's message, made once for all who watch."""
        seen, message = self._last_window
        if seen is not snapshot:
            message = window_message(snapshot)
            self._last_window = snapshot, message
        return message


def tokenizer_hash(files: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) over names and contents in order; "" when there are none."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for path, data in files.items():
        digest.update(f"{path}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _past_from_proto(entry: engine_pb2.SequencePast) -> SequencePast:
    try:
        reason = FinishReason(entry.finish_reason) if entry.finish_reason else None
    except ValueError:
        raise InvalidArgumentError("past", "holds an unknown finish reason") from None
    return SequencePast(
        index=entry.index,
        output_token_ids=list(entry.output_token_ids),
        finish_reason=reason,
        cumulative_logprob=entry.cumulative_logprob,
    )
