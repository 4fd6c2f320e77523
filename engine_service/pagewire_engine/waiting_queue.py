"""The requests that wait for blocks, and which of them starts next."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from pagewire_engine.request import Request
from pagewire_engine.tenant_accounts import TenantAccounts

_Key = tuple[int, int, int]
_Entry = tuple[_Key, int, "_Line"]


class _Line:
    """The waiting requests of one tenant with one priority, in order of arrival.

    A plain list: a preempted request goes back to its head, and one that is aborted leaves from
    anywhere. To move the rest of a few thousand takes a microsecond.
    """

    __slots__ = ("entry", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.entry: _Entry | None = None

    def key(self) -> _Key:
        """By what its head competes with those of other lines."""
        return self.requests[0].fair_order


class WaitingQueue:
    """Waiting requests in order of priority, then of what their tenants have been served (see
    `tenant_accounts`), then of arrival.

    No operation takes longer for the requests that wait: `head` finds the next of k tenants in
    O(log k), amortised. The engine's thread changes the queue; `len`, `num_waiting` and
    `num_tenants` may be read from any thread.

    Args:
        burst: see `TenantAccounts`.
    """

    def __init__(self, burst: int = 0) -> None:
        self._accounts = TenantAccounts(burst)
        self._lines: dict[tuple[int, str], _Line] = {}
        # Keys only ever grow while a line stands still, so an entry that is out of date is too
        # early, and is put right when it comes to the top.
        self._heap: list[_Entry] = []
        self._entry_numbers = itertools.count()
        self._never_started: OrderedDict[int, Request] = OrderedDict()
        self._length = 0

    def add(self, request: Request) -> None:
        """Puts a request in its tenant's line by its arrival: a new one at the end, one that was
        preempted at the head."""
        priority, arrival = request.order
        request.account = self._accounts.enter(request.tenant)
        line = self._lines.get((priority, request.tenant))
        if line is None:
            line = self._lines[priority, request.tenant] = _Line()
        insort(line.requests, request, key=_order)
        if line.requests[0] is request:
            self._push(line)
        if request.clock.first_scheduled is None and not request.resubmission:
            self._never_started[arrival] = request
        self._length += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands: it starts, or has ended. One that does not wait
        is no error."""
        priority, arrival = request.order
        line = self._lines.get((priority, request.tenant))
        if line is None:
            return
        index = bisect_left(line.requests, request.order, key=_order)
        if index == len(line.requests) or line.requests[index] is not request:
            return
        del line.requests[index]
        if not line.requests:
            line.entry = None
            del self._lines[priority, request.tenant]
        self._never_started.pop(arrival, None)
        self._accounts.leave(request.account)
        self._length -= 1

    def head(self) -> Request | None:
        """The request that starts next; None when none waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            if entry[0] == line.key():
                return line.requests[0]
            heapreplace(heap, self._entry(line))
        return None

    def oldest(self) -> Request | None:
        """Of the requests that have never started, here or elsewhere, the one that came first."""
        return next(iter(self._never_started.values()), None)

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant that wait."""
        return self._accounts.num_waiting(tenant)

    @property
    def num_tenants(self) -> int:
        """Tenants with a request that waits."""
        return self._accounts.num_waiting_tenants

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0

    def __iter__(self) -> Iterator[Request]:
        """By priority, then arrival."""
        return iter(sorted((r for line in self._lines.values() for r in line.requests), key=_order))

    def _push(self, line: _Line) -> None:
        heappush(self._heap, self._entry(line))
        if len(self._heap) > 2 * len(self._lines) + 16:
            # Mostly entries of lines that are gone.
            self._heap = [each.entry for each in self._lines.values() if each.entry is not None]
            heapify(self._heap)

    def _entry(self, line: _Line) -> _Entry:
        """The one entry of a line that counts from now on."""
        line.entry = (line.key(), next(self._entry_numbers), line)
        return line.entry


def _order(request: Request) -> tuple[int, int]:
    return request.order
