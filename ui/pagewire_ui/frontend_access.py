"""How the page reaches its frontend: with or without TLS, with or without an API key."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

from pagewire.tls import ClientTls
from pagewire.v1 import inference_pb2, inference_pb2_grpc

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 64 << 20),
]
_LOGIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class FrontendAccess:
    """What the page shows its frontend.

    Attributes:
        api_key: None: it needs none.
        tls: of the channel; None: it has none.
    """

    api_key: str | None = None
    tls: ClientTls | None = None

    def channel(self, target: str) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        if self.tls is None:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, self.tls.grpc_credentials(), options=CHANNEL_OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What to send with each call."""
        return _bearer(self.api_key)

    async def accepts(self, target: str, api_key: str) -> bool:
        """Whether the frontend serves those who show this key."""
        if not api_key or not all("!" <= character <= "~" for character in api_key):
            return False
        async with self.channel(target) as channel:
            try:
                await inference_pb2_grpc.InferenceStub(channel).ListModels(
                    inference_pb2.ListModelsRequest(),
                    timeout=_LOGIN_TIMEOUT_S,
                    metadata=_bearer(api_key),
                )
            except grpc.aio.AioRpcError:
                return False
        return True


def _bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if not api_key else (("authorization", f"Bearer {api_key}"),)
