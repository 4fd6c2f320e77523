"""The adapters of one frontend's engine over the public gRPC API. Nothing of Gradio here."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import grpc.aio

from pagewire.v1 import engine_pb2
from pagewire_ui.frontend_link import FrontendLink

_LIST_TIMEOUT_S = 5.0
# What the engine says of a name that is loaded, in words of the API: the page has others.
_REPLACEABLE = "is loaded; replace it with in_place"


@dataclass(frozen=True, slots=True)
class Listing:
    """What the engine says of its adapters.

    Attributes:
        problem: why there is nothing more; "" where there is.
        allowed: whether this server lets clients ask and change.
    """

    adapters: list[engine_pb2.AdapterInfo] = field(default_factory=list)
    limits: engine_pb2.AdapterLimits | None = None
    loadable_paths: list[str] = field(default_factory=list)
    problem: str = ""
    allowed: bool = True


class AdaptersClient:
    """Asks one frontend. Use it in the link's event loop."""

    def __init__(self, link: FrontendLink) -> None:
        self._link = link

    async def listing(self) -> Listing:
        """The adapters and what could be loaded, or why that is not told."""
        request = engine_pb2.ListAdaptersRequest()
        try:
            answer = await self._link.adapters.List(
                request, timeout=_LIST_TIMEOUT_S, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            off = error.code() in (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.UNIMPLEMENTED,
            )
            return Listing(problem=self._link.explain(error), allowed=not off)
        limits = answer.limits if answer.HasField("limits") else None
        return Listing(list(answer.adapters), limits, list(answer.loadable_paths))

    async def load(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads an adapter, or what its path holds now in place of what is loaded.

        Raises:
            AdapterError: it was not; the text is for the person.
        """
        try:
            answer: engine_pb2.LoadAdapterResponse = await self._link.adapters.Load(
                request, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            # Names are taken for other reasons too, which the engine says in words.
            code, details = error.code(), error.details() or ""
            if code == grpc.StatusCode.ALREADY_EXISTS and _REPLACEABLE in details:
                raise AdapterError(
                    f"{request.name} is loaded already: “Update in place” replaces it, another "
                    "name loads it beside the one that is there."
                ) from None
            raise AdapterError(self._link.explain(error)) from None
        return answer.adapter

    async def unload(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads an adapter; returns when its memory is free.

        Raises:
            AdapterError: it stays; the text is for the person.
        """
        try:
            answer: engine_pb2.UnloadAdapterResponse = await self._link.adapters.Unload(
                request, metadata=self._link.metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise AdapterError(
                    "Its requests did not end in time: it stays loaded and takes requests again. "
                    "Wait longer, or end them."
                ) from None
            raise AdapterError(self._link.explain(error)) from None
        return answer


class AdapterError(Exception):
    """What was asked for was not done; the text is for the person at the page."""
