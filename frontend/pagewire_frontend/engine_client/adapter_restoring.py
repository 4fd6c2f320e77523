"""What an engine had of adapters, so that another life of it can be given the same."""

from __future__ import annotations

import asyncio
import logging
import time

from pagewire.errors import AlreadyExistsError, PagewireError, ResourceExhaustedError
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.control import ControlChannel, TransportError

logger = logging.getLogger(__name__)

_RESTORE_TIMEOUT_S = 60.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 1.0


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
        self._adapters = _lasting(listed)

    async def restore(
        self,
        control: ControlChannel,
        window_s: float,
        *,
        served_model_name: str = "",
        forgets: bool = True,
    ) -> None:
        """Loads them into a new life of the engine, before requests that name them come again.

        One whose files have changed since is loaded as it is now: requests that began with the old
        version fail, and later ones are served.

        Args:
            control: of the new life.
            window_s: how long to wait for other frontends, which restore the same adapters.
            served_model_name: of the new life: an adapter can't have it.
            forgets: whether one that can't be loaded is forgotten, since no other engine has it.

        Raises:
            TransportError: the engine did not answer.
        """
        if not self._adapters:
            return
        deadline = time.monotonic() + window_s
        try:
            present = _lasting(await control.list_adapters())
        except TransportError:
            raise
        except PagewireError as error:
            logger.error("adapters could not be loaded again: %s", error.message)
            if forgets:
                self._adapters.clear()
            return
        for info in list(self._adapters.values()):
            try:
                if info.name == served_model_name:
                    # The engine would say so again and again, as of one that is being loaded.
                    raise AlreadyExistsError(
                        f"the model that is served now is called {info.name!r}"
                    )
                await self._restore_one(control, info, present, deadline)
            except TransportError:
                raise
            except PagewireError as error:
                logger.error("adapter %r could not be loaded again: %s", info.name, error.message)
                if forgets:
                    self.note_unloaded(info.name)

    async def _restore_one(
        self,
        control: ControlChannel,
        info: engine_pb2.AdapterInfo,
        present: dict[str, engine_pb2.AdapterInfo],
        deadline: float,
    ) -> None:
        """Loads one that is not there; waits while another frontend loads it."""
        request = engine_pb2.LoadAdapterRequest(
            name=info.name,
            path=info.path,
            base_model_name=info.parent if info.parent != info.root else "",
            in_place=True,
            version=info.version,
        )
        delay = _MIN_RETRY_S
        while not self._is_restored(info, present.get(info.name)):
            try:
                await self._load(control, request)
                return
            except (AlreadyExistsError, ResourceExhaustedError):
                if time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_RETRY_S)
            present = _lasting(await control.list_adapters())

    def _is_restored(
        self, wanted: engine_pb2.AdapterInfo, present: engine_pb2.AdapterInfo | None
    ) -> bool:
        if present is None:
            return False
        if present.version == wanted.version:
            return True
        if not (wanted.from_settings and present.from_settings):
            return False
        # The engine has read it itself; its path may be none that clients can load from.
        logger.warning("adapter %r has changed on disk", wanted.name)
        self.note_loaded(present)
        return True

    async def _load(self, control: ControlChannel, request: engine_pb2.LoadAdapterRequest) -> None:
        try:
            await control.load_adapter(request, timeout_s=_RESTORE_TIMEOUT_S)
        except PagewireError as error:
            if error.field != "version":
                raise
            logger.warning("adapter %r has changed on disk: %s", request.name, error.message)
            request.version = ""
            self.note_loaded(await control.load_adapter(request, timeout_s=_RESTORE_TIMEOUT_S))


def versions_in(listed: engine_pb2.ListAdaptersResponse) -> dict[str, str]:
    """Of the adapters that requests may name, by name."""
    return {name: info.version for name, info in _lasting(listed).items()}


def _lasting(listed: engine_pb2.ListAdaptersResponse) -> dict[str, engine_pb2.AdapterInfo]:
    """Those that requests may name."""
    states = engine_pb2.AdapterInfo.State
    passing = (states.STATE_LOADING, states.STATE_LEAVING)
    return {info.name: info for info in reversed(listed.adapters) if info.state not in passing}
