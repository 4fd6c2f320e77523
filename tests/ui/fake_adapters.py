"""An engine's adapters, for tests of the page."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from pagewire.v1 import engine_pb2, operations_pb2_grpc

# For tests that look at what goes on in the meantime.
_PATIENCE_S = 300.0


class FakeAdapters(operations_pb2_grpc.AdaptersServicer):
    """Loads any path but "missing"; an unload may be made to wait.

    Attributes:
        allowed: whether clients may do any of it.
        requests: all that was asked for but List.
        loading: a load returns when this is set.
        leaving: an unload that waits returns when this is set.
    """

    def __init__(self) -> None:
        self.allowed = True
        self.requests: list[Any] = []
        self.loading = threading.Event()
        self.loading.set()
        self.leaving = threading.Event()
        self.leaving.set()
        self._lock = threading.Lock()
        self._adapters: dict[str, engine_pb2.AdapterInfo] = {}

    def add(self, name: str, path: str = "sql", version: str = "a" * 64, **fields: Any) -> None:
        """An adapter that is loaded."""
        with self._lock:
            self._adapters[name] = engine_pb2.AdapterInfo(
                name=name,
                path=path,
                version=version,
                rank=8,
                bytes=1_250_000,
                host_bytes=1_250_000,
                state=engine_pb2.AdapterInfo.STATE_HOST,
                parent="fake-model",
                root="fake-model",
                alpha=16,
                modules=["down_proj", "q_proj"],
                **fields,
            )

    def drop(self, name: str) -> None:
        """Takes one away."""
        with self._lock:
            del self._adapters[name]

    def listed(self) -> list[engine_pb2.AdapterInfo]:
        """Those that are loaded, by name."""
        with self._lock:
            return [self._adapters[name] for name in sorted(self._adapters)]

    def List(self, request: Any, context: grpc.ServicerContext) -> engine_pb2.ListAdaptersResponse:
        """The loaded adapters, and two folders more."""
        self._check(context)
        limits = engine_pb2.AdapterLimits(max_loras=4, max_cpu_loras=8, max_lora_rank=16)
        return engine_pb2.ListAdaptersResponse(
            adapters=self.listed(), limits=limits, loadable_paths=["sql", "poems"]
        )

    def Load(
        self, request: engine_pb2.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> engine_pb2.LoadAdapterResponse:
        """Loads, where the path is there and the name free."""
        self._check(context)
        self.requests.append(request)
        if request.path == "missing":
            context.abort(grpc.StatusCode.NOT_FOUND, "path: no folder 'missing' under --lora-dir")
        if request.name in self._adapters and not request.in_place:
            context.abort(
                grpc.StatusCode.ALREADY_EXISTS,
                f"name: an adapter {request.name!r} is loaded; replace it with in_place, or choose "
                "another name",
            )
        old = self._adapters.get(request.name)
        self.add(request.name, request.path)
        self._adapters[request.name].state = engine_pb2.AdapterInfo.STATE_LOADING
        self.loading.wait(_PATIENCE_S)
        self.add(request.name, request.path, version="b" * 64 if old else "a" * 64)
        return engine_pb2.LoadAdapterResponse(adapter=self._adapters[request.name])

    def Unload(
        self, request: engine_pb2.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads, at once or when it is let."""
        self._check(context)
        self.requests.append(request)
        if request.name not in self._adapters:
            context.abort(grpc.StatusCode.NOT_FOUND, f"name: no adapter {request.name}")
        self._adapters[request.name].state = engine_pb2.AdapterInfo.STATE_LEAVING
        self._adapters[request.name].num_running_requests = 2
        if request.mode != engine_pb2.UnloadAdapterRequest.MODE_ABORT:
            self.leaving.wait(_PATIENCE_S)
        with self._lock:
            del self._adapters[request.name]
        return engine_pb2.UnloadAdapterResponse(num_ended_requests=2, host_bytes=1_250_000)

    def _check(self, context: grpc.ServicerContext) -> None:
        if not self.allowed:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "adapters can't be changed here; start the frontend with "
                "--allow-runtime-lora-updating",
            )
