"""Adapters of several engines as if they were one's."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pagewire.errors import NotFoundError, PagewireError, UnavailableError
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client.adapter_restoring import RememberedAdapters, versions_in
from pagewire_frontend.engine_client.fleet import Fleet
from pagewire_frontend.engine_client.link import EngineLink

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicatedAdapters:
    """Loads adapters into every engine, and requests that name one go where it is.

    Args:
        fleet: the engines.
        remembered: told what there is, for engines that come or come back.
    """

    def __init__(self, fleet: Fleet, remembered: RememberedAdapters) -> None:
        self._fleet = fleet
        self._remembered = remembered

    async def load(self, request: engine_pb2.LoadAdapterRequest) -> engine_pb2.AdapterInfo:
        """Loads it into one engine, and then the same version into the others.

        Raises:
            PagewireError: the first can't load it. One of the others that can't is said in the
                log, and gets no requests for it.
        """
        first, *others = self._engines()
        info = await first.control.load_adapter(request)
        self._remembered.note_loaded(info)
        first.adapters[info.name] = info.version
        same = engine_pb2.LoadAdapterRequest()
        same.CopyFrom(request)
        same.version = info.version

        async def load_too(link: EngineLink) -> None:
            try:
                await link.control.load_adapter(same)
                link.adapters[info.name] = info.version
            except PagewireError as error:
                link.adapters.pop(info.name, None)
                _logger.error(
                    "the engine at %s has not loaded the adapter %r and gets no requests for it: "
                    "%s",
                    link.name,
                    info.name,
                    error.message,
                )

        await asyncio.gather(*map(load_too, others))
        return info

    async def unload(
        self, request: engine_pb2.UnloadAdapterRequest
    ) -> engine_pb2.UnloadAdapterResponse:
        """Unloads it everywhere, as its requests have ended or are ended.

        Raises:
            PagewireError: it stays in an engine at least; the error says why.
        """
        links = self._engines()
        answers = await _each(links, lambda link: link.control.unload_adapter(request))
        total = engine_pb2.UnloadAdapterResponse()
        failures: list[PagewireError] = []
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, PagewireError):
                failures.append(answer)
                continue
            link.adapters.pop(request.name, None)
            total.num_ended_requests += answer.num_ended_requests
            total.host_bytes += answer.host_bytes
            total.device_bytes += answer.device_bytes
        serious = [error for error in failures if not isinstance(error, NotFoundError)]
        if serious or len(failures) == len(links):
            raise (serious or failures)[0]
        self._remembered.note_unloaded(request.name)
        return total

    async def listed(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        """What is loaded, in any engine; nothing where that is known in this revision.

        Raises:
            FailedPreconditionError: the engines have no adapters.
            UnavailableError: none has answered.
        """
        links = self._engines()
        if len(links) == 1 and len(self._fleet.links) == 1:
            answers = [await links[0].control.list_adapters(unless_revision)]
        else:
            answers = await self._ask(links)
        told = merged_adapters(answers)
        if not unless_revision or told.revision != unless_revision:
            # One that has not answered may be all that has an adapter.
            if len(answers) == len(links):
                self._remembered.note_listed(told)
            return told
        return engine_pb2.ListAdaptersResponse(revision=told.revision)

    async def _ask(self, links: Sequence[EngineLink]) -> list[engine_pb2.ListAdaptersResponse]:
        """The answers of those engines that give one."""
        answers = await _each(links, lambda link: link.control.list_adapters())
        told: list[engine_pb2.ListAdaptersResponse] = []
        failures: list[PagewireError] = []
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, PagewireError):
                failures.append(answer)
            else:
                link.adapters = versions_in(answer)
                told.append(answer)
        if not told:
            raise failures[0]
        return told

    def _engines(self) -> list[EngineLink]:
        links = self._fleet.usable
        if not links:
            raise UnavailableError("the engine is away")
        return links


async def _each(
    links: Sequence[EngineLink], call: Callable[[EngineLink], Awaitable[T]]
) -> list[T | PagewireError]:
    """All answers, errors among them."""

    async def one(link: EngineLink) -> T | PagewireError:
        try:
            return await call(link)
        except PagewireError as error:
            return error

    return list(await asyncio.gather(*map(one, links)))


def merged_adapters(
    told: Sequence[engine_pb2.ListAdaptersResponse],
) -> engine_pb2.ListAdaptersResponse:
    """What several engines have: requests and memory added up, by name and version."""
    if len(told) == 1:
        return told[0]
    revisions = "\0".join(answer.revision for answer in told)
    merged = engine_pb2.ListAdaptersResponse(
        limits=told[0].limits,
        loadable_paths=told[0].loadable_paths,
        revision=hashlib.sha256(revisions.encode()).hexdigest(),
    )
    places: dict[tuple[str, str, int], engine_pb2.AdapterInfo] = {}
    states = engine_pb2.AdapterInfo.State
    for answer in told:
        for info in answer.adapters:
            passing = info.state in (states.STATE_LOADING, states.STATE_LEAVING)
            key = (info.name, info.version, info.state if passing else 0)
            known = places.get(key)
            if known is None:
                known = places[key] = engine_pb2.AdapterInfo()
                known.CopyFrom(info)
                continue
            known.state = max(known.state, info.state)
            known.host_bytes += info.host_bytes
            known.device_bytes += info.device_bytes
            known.num_running_requests += info.num_running_requests
            known.num_waiting_requests += info.num_waiting_requests
    # One that leaves comes after its heir.
    merged.adapters.extend(
        places[key] for key in sorted(places, key=lambda key: (key[0], key[2], key[1]))
    )
    return merged
