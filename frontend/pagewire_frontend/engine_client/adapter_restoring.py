"""What an engine had of adapters, so that another life of it can be given the same."""

from __future__ import annotations

import logging

from pagewire.errors import PagewireError
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.control import ControlChannel, TransportError

logger = logging.getLogger(__name__)

_RESTORE_TIMEOUT_S = 60.0


class RememberedAdapters:
    """The adapters that an engine had when it was last heard of, in their versions."""

    def __init__(self) -> None:
        self._adapters: dict[str, engine_pb2.AdapterInfo] = {}

    def note_loaded(self, info: engine_pb2.AdapterInfo) -> None:
        """One was loaded, or replaced."""
        self._adapters[info.name] = info

    def note_unloaded(self, name: str) -> None:
        """One has gone."""
        self._adapters.pop(name, None)

    def note_listed(self, listed: engine_pb2.ListAdaptersResponse) -> None:
        """What there is now. One that is leaving may be the old version of another."""
        states = engine_pb2.AdapterInfo.State
        passing = (states.STATE_LOADING, states.STATE_LEAVING)
        self._adapters = {
            info.name: info for info in reversed(listed.adapters) if info.state not in passing
        }

    async def restore(self, control: ControlChannel) -> None:
        """Loads them into a new life of the engine, before requests that name them come again.

        One whose files have changed since is loaded as it is now: requests that began with the old
        version fail, and later ones are served.

        Raises:
            TransportError: the engine did not answer.
        """
        for info in list(self._adapters.values()):
            request = engine_pb2.LoadAdapterRequest(
                name=info.name,
                path=info.path,
                base_model_name=info.parent if info.parent != info.root else "",
                in_place=True,
                version=info.version,
            )
            try:
                await self._load(control, request)
            except TransportError:
                raise
            except PagewireError as error:
                logger.error("adapter %r could not be loaded again: %s", info.name, error.message)
                del self._adapters[info.name]

    async def _load(self, control: ControlChannel, request: engine_pb2.LoadAdapterRequest) -> None:
        try:
            await control.load_adapter(request, timeout_s=_RESTORE_TIMEOUT_S)
        except PagewireError as error:
            if error.field != "version":
                raise
            logger.warning("adapter %r has changed on disk: %s", request.name, error.message)
            request.version = ""
            self.note_loaded(await control.load_adapter(request, timeout_s=_RESTORE_TIMEOUT_S))
