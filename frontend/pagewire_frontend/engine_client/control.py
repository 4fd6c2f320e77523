"""The engine's control calls, with typed errors and a deadline on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import grpc

from pagewire.certificates import stamps_of
from pagewire.conversion import (
    beam_search_to_proto,
    pooling_info_from_proto,
    pooling_params_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
    tasks_from_proto,
)
from pagewire.errors import FailedPreconditionError, NotFoundError, PagewireError, UnavailableError
from pagewire.outputs import FinishReason
from pagewire.tls import ClientTls
from pagewire.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from pagewire_frontend.engine_client.base import EngineRequest, ModelInfo
from pagewire_frontend.engine_client.grpc_errors import typed_error
from pagewire_frontend.engine_client.mailbox import SequenceRecord

CALL_TIMEOUT_S = 10.0
SUBMIT_TIMEOUT_S = 30.0
# To read an adapter's weights from a slow disk.
LOAD_TIMEOUT_S = 300.0
_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # The engine may be back at any moment: gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# Statuses that say nothing of the request: the connection or the engine's session is at fault.
_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
}

ResponseT = TypeVar("ResponseT")


class ControlChannel:
    """A gRPC channel to an engine.

    Args:
        target: HOST:PORT.
        tls: None: the channel has none.
        certified_name: the host that the engine's certificate names, where it is not the target's.
    """

    def __init__(
        self, target: str, tls: ClientTls | None = None, certified_name: str | None = None
    ) -> None:
        self.target = target
        self._files = [] if tls is None else [tls.ca, tls.certificate, tls.key]
        # Before they are read.
        self._stamps = stamps_of(self._files)
        options: list[tuple[str, str | int]] = list(_OPTIONS)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            if certified_name is not None:
                options.append(("grpc.ssl_target_name_override", certified_name))
            credentials = tls.grpc_credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._stub = engine_pb2_grpc.EngineStub(self._channel)

    @property
    def outdated(self) -> bool:
        """Whether its certificates have been renewed since: a connection that it has goes on, but
        one that it makes would still show the old ones."""
        return stamps_of(self._files) != self._stamps

    @property
    def host(self) -> str:
        """The host part of the target."""
        return self.target.rpartition("/")[2].rpartition(":")[0]

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._channel.close(None)

    async def attach(
        self, session_id: str, secret: str, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> engine_pb2.AttachResponse:
        """Opens a session, or takes one over when an id is given."""
        request = engine_pb2.AttachRequest()
        if session_id:
            request.session_id, request.secret = session_id, secret
        return await _typed(self._stub.Attach(request, timeout=timeout_s))

    async def detach(self, session_id: str, secret: str, *, timeout_s: float) -> None:
        """Ends a session, and whatever runs in it."""
        request = engine_pb2.DetachRequest(session_id=session_id, secret=secret)
        await _typed(self._stub.Detach(request, timeout=timeout_s))

    async def submit(
        self,
        session_id: str,
        stream: int,
        request: EngineRequest,
        *,
        seed: int | None,
        past: list[SequenceRecord] | None,
        adapter_version: str = "",
    ) -> engine_pb2.SubmitResponse:
        """Hands a request over.

        Args:
            session_id: of a session that has said Hello.
            stream: its number in the session.
            request: what to do.
            seed: the seed in force, where the engine has named it before.
            past: what has come already, for a resubmission.
            adapter_version: the version in force, where it is known.

        Returns:
            The seed and the adapter's version in force.
        """
        message = engine_pb2.SubmitRequest(
            session_id=session_id,
            stream=stream,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            tenant=request.tenant,
            priority=request.priority,
            adapter=request.adapter,
            adapter_version=adapter_version,
            resubmission=past is not None,
        )
        if request.pooling is not None:
            message.pooling_params.CopyFrom(pooling_params_to_proto(request.pooling))
        elif request.sampling_params.beam_search is not None:
            message.beam_search.CopyFrom(beam_search_to_proto(request.sampling_params))
        else:
            message.sampling_params.CopyFrom(sampling_params_to_proto(request.sampling_params))
            if seed is not None:
                message.sampling_params.seed = seed
        for index, record in enumerate(past or ()):
            message.past.add(
                index=index,
                output_token_ids=record.token_ids,
                finish_reason=int(record.finish_reason or 0),
                cumulative_logprob=record.cumulative_logprob,
            )
        metadata = request.trace_headers or None
        return await _typed(self._stub.Submit(message, timeout=SUBMIT_TIMEOUT_S, metadata=metadata))

    async def load_adapter(
        self, request: engine_pb2.LoadAdapterRequest, *, timeout_s: float = LOAD_TIMEOUT_S
    ) -> engine_pb2.AdapterInfo:
        """Loads an adapter; returns when requests may name it."""
        response: engine_pb2.LoadAdapterResponse = await _typed(
            self._stub.LoadAdapter(request, timeout=timeout_s)
        )
        return response.adapter

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter, however long its requests take."""
        return await _typed(self._stub.UnloadAdapter(request))

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, and where it is; nothing where that is known in this revision."""
        request = engine_pb2.ListAdaptersRequest(unless_revision=unless_revision)
        return await _typed(self._stub.ListAdapters(request, timeout=CALL_TIMEOUT_S))

    async def abort(
        self,
        session_id: str,
        request_id: str,
        sequence: int | None,
        reason: FinishReason,
        stream: int | None,
    ) -> None:
        """Ends a request or one of its sequences.

        Args:
            session_id: of the session that has it.
            request_id: of the request.
            sequence: None: all of them.
            reason: to be told for it.
            stream: only as it was submitted under this number; None: under any.
        """
        message = engine_pb2.AbortRequest(
            session_id=session_id, request_id=request_id, reason=_REASONS[reason]
        )
        if sequence is not None:
            message.sequence = sequence
        if stream is not None:
            message.stream = stream
        await _typed(self._stub.Abort(message, timeout=CALL_TIMEOUT_S))

    async def model_info(self) -> ModelInfo:
        """What the engine serves."""
        response: engine_pb2.GetModelInfoResponse = await _typed(
            self._stub.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=CALL_TIMEOUT_S)
        )
        return ModelInfo(
            served_model_name=response.served_model_name,
            architecture=response.architecture,
            dtype=response.dtype,
            device=response.device,
            vocab_size=response.vocab_size,
            max_model_len=response.max_model_len,
            block_size=response.block_size,
            num_blocks=response.num_blocks,
            eos_token_ids=tuple(response.eos_token_ids),
            default_sampling_params=sampling_params_from_proto(response.default_sampling_params),
            tokenizer_sha256=response.tokenizer_sha256,
            created=response.created,
            epoch=response.epoch,
            weights_sha256=response.weights_sha256,
            max_loras=response.adapter_limits.max_loras,
            tasks=tasks_from_proto(response.tasks),
            pooling=(
                pooling_info_from_proto(response.pooling) if response.HasField("pooling") else None
            ),
        )

    async def stats(self, timeout_s: float) -> engine_pb2.GetStatsResponse:
        """What the engine counts, as of now."""
        async for stats in self.watch_stats(engine_pb2.GetStatsRequest(), timeout_s=timeout_s):
            return stats
        raise TransportError("the engine has told no statistics")

    async def watch_stats(
        self, request: engine_pb2.GetStatsRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[engine_pb2.GetStatsResponse, None]:
        """What the engine counts, as often as the request says."""
        call = self._stub.GetStats(request, timeout=timeout_s)
        try:
            async for stats in call:
                yield stats
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        finally:
            call.cancel()

    async def tokenizer_files(self, adapter: str = "", version: str = "") -> dict[str, bytes]:
        """The tokenizer's files by name, or those that an adapter ships in their place."""
        chunks: dict[str, list[bytes]] = {}
        call = self._stub.GetTokenizer(
            engine_pb2.GetTokenizerRequest(adapter=adapter, adapter_version=version), timeout=60.0
        )
        try:
            async for chunk in call:
                chunks.setdefault(chunk.path, []).append(chunk.data)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        return {path: b"".join(parts) for path, parts in chunks.items()}


class TransportError(UnavailableError):
    """The engine did not answer; whether it got the call is not known."""


class DrainingError(TransportError):
    """The engine has refused a request, as it will refuse all from now on."""


async def _typed(call: Awaitable[ResponseT]) -> ResponseT:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _translated(error) from None
    except asyncio.CancelledError:
        # gRPC raises it also when the channel was closed under the call; only our own task's
        # cancellation goes on as one.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise TransportError("the connection to the engine was closed") from None


def _translated(error: grpc.aio.AioRpcError) -> PagewireError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and (told := typed_error(error)).field:
        return told  # the engine's own word, of a time that the caller gave
    if error.code() is grpc.StatusCode.UNAVAILABLE and typed_error(error).field == "engine":
        return DrainingError("the engine takes no new requests: it drains")
    if error.code() in _TRANSPORT:
        return TransportError(f"the engine did not answer: {error.details()}")
    return typed_error(error)


def is_session_lost(error: PagewireError) -> bool:
    """Whether the engine says that it does not know our session, or has lost its connection."""
    return error.field == "session_id" and isinstance(
        error, NotFoundError | FailedPreconditionError
    )
