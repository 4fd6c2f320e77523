"""pagewire.v1.Adapters and pagewire.v1.Observability: known, and off in this version."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from pagewire.errors import FailedPreconditionError
from pagewire.v1 import engine_pb2, operations_pb2_grpc
from pagewire_frontend.grpc_api.errors import answers_errors

Context = grpc.aio.ServicerContext[Any, Any]


class AdaptersServicer(operations_pb2_grpc.AdaptersServicer):  # type: ignore[misc]  # generated, untyped
    """Answers FAILED_PRECONDITION: LoRA adapters are off."""

    @answers_errors
    async def Load(self, request: engine_pb2.LoadAdapterRequest, context: Context) -> NoReturn:
        _refuse_adapters()

    @answers_errors
    async def Unload(self, request: engine_pb2.UnloadAdapterRequest, context: Context) -> NoReturn:
        _refuse_adapters()

    @answers_errors
    async def List(self, request: engine_pb2.ListAdaptersRequest, context: Context) -> NoReturn:
        _refuse_adapters()


class ObservabilityServicer(
    operations_pb2_grpc.ObservabilityServicer  # type: ignore[misc]  # generated, untyped
):
    """Answers FAILED_PRECONDITION: watching the engine through the public API is off."""

    @answers_errors
    async def WatchStats(self, request: engine_pb2.GetStatsRequest, context: Context) -> NoReturn:
        raise FailedPreconditionError(
            "WatchStats is off on this server; GET /metrics of its HTTP port has the counters"
        )


def _refuse_adapters() -> NoReturn:
    raise FailedPreconditionError("LoRA adapters are off on this server")
