"""Loading and unloading adapters at run time, where the operator allows it."""

from __future__ import annotations

from pagewire.errors import FailedPreconditionError
from pagewire.v1 import engine_pb2
from pagewire_frontend.generation import Generation
from pagewire_frontend.serving import Serving


async def load_adapter(
    serving: Serving, request: engine_pb2.LoadAdapterRequest
) -> engine_pb2.AdapterInfo:
    """Loads an adapter from the engine's `--lora-dir`; returns when requests may name it.

    Raises:
        PagewireError: it is not allowed, or it can't be loaded; the error says why.
    """
    generation = _allowed(serving)
    info = await generation.client.load_adapter(request)
    await generation.adapters.refresh()
    # Says so where what it ships can't be used.
    generation.adapters.find(info.name)
    return info


async def unload_adapter(
    serving: Serving, request: engine_pb2.UnloadAdapterRequest
) -> engine_pb2.UnloadAdapterResponse:
    """Unloads an adapter, as its requests have ended or are ended.

    Raises:
        PagewireError: it is not allowed, or the adapter stays; the error says why.
    """
    generation = _allowed(serving)
    response = await generation.client.unload_adapter(request)
    await generation.adapters.refresh()
    return response


async def list_adapters(serving: Serving) -> engine_pb2.ListAdaptersResponse:
    """What the engine has of adapters, and where.

    Raises:
        PagewireError: it is not allowed, or the engine has none.
    """
    return await _allowed(serving).client.list_adapters()


def _allowed(serving: Serving) -> Generation:
    if not serving.config.allow_runtime_lora_updating:
        raise FailedPreconditionError(
            "adapters are not managed at run time on this server; start the frontend with "
            "--allow-runtime-lora-updating, and the engine with --enable-lora and --lora-dir"
        )
    return serving.generation
