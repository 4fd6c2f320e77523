"""The requests that wait for blocks, and which of them starts next."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from pagewire_engine.request import Request
from pagewire_engine.tenant_accounts import TenantAccounts

_Key = tuple[int, int, int, int]
_Entry = tuple[_Key, int, "_Line"]


def _anyone(adapter: int) -> bool:
    return True


class _Line:
    """The waiting requests of one tenant with one priority and one adapter, in order of arrival.

    A plain list: a preempted request goes back to its head, and one that is aborted leaves from
    anywhere. To move the rest of a few thousand takes a microsecond.
    """

    __slots__ = ("entry", "requests", "turn")

    def __init__(self, turn: int) -> None:
        self.requests: list[Request] = []
        self.entry: _Entry | None = None
        # Among the adapters of a tenant: whose line had its turn first is next.
        self.turn = turn

    def key(self) -> _Key:
        """By what its head competes with those of other lines."""
        priority, service, arrival = self.requests[0].fair_order
        return priority, service, self.turn, arrival


class WaitingQueue:
    """Waiting requests in order of priority, then of what their tenants have been served (see
    `tenant_accounts`), then of arrival; but the adapters of a tenant take turns.

    No operation takes longer for the requests that wait: `head` finds the next of k tenants in
    O(log k) for each adapter that may start, amortised. The engine's thread changes the queue;
    `len`, `num_waiting` and `num_tenants` may be read from any thread.

    Args:
        burst: see `TenantAccounts`.
    """

    def __init__(self, burst: int = 0) -> None:
        self._accounts = TenantAccounts(burst)
        self._lines: dict[tuple[int, str, int], _Line] = {}
        self._num_lines: Counter[tuple[int, str]] = Counter()
        self._turns = 0
        # One for each adapter. Keys only ever grow while a line stands still, so an entry that is
        # out of date is too early, and is put right when it comes to the top.
        self._heaps: dict[int, list[_Entry]] = {}
        self._entry_numbers = itertools.count()
        self._never_started: OrderedDict[int, Request] = OrderedDict()
        self._length = 0

    def add(self, request: Request) -> None:
        """Puts a request in its tenant's line by its arrival: a new one at the end, one that was
        preempted at the head."""
        priority, arrival = request.order
        request.account = self._accounts.enter(request.tenant)
        key = (priority, request.tenant, request.adapter)
        line = self._lines.get(key)
        if line is None:
            self._num_lines[key[:2]] += 1
            line = self._lines[key] = _Line(self._turns if self._num_lines[key[:2]] > 1 else 0)
        insort(line.requests, request, key=_order)
        if line.requests[0] is request:
            self._push(line, request.adapter)
        if request.clock.first_scheduled is None and not request.resubmission:
            self._never_started[arrival] = request
        self._length += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands: it starts, or has ended. One that does not wait
        is no error."""
        priority, arrival = request.order
        key = (priority, request.tenant, request.adapter)
        line = self._lines.get(key)
        if line is None:
            return
        index = bisect_left(line.requests, request.order, key=_order)
        if index == len(line.requests) or line.requests[index] is not request:
            return
        del line.requests[index]
        if self._num_lines[key[:2]] > 1:
            self._turns += 1
            line.turn = self._turns
        if not line.requests:
            line.entry = None
            del self._lines[key]
            self._num_lines[key[:2]] -= 1
            if not self._num_lines[key[:2]]:
                del self._num_lines[key[:2]]
            self._drop_heap_of(request.adapter)
        self._never_started.pop(arrival, None)
        self._accounts.leave(request.account)
        self._length -= 1

    def head(self, may_start: Callable[[int], bool] = _anyone) -> Request | None:
        """The request that starts next; None when none waits that may.

        Args:
            may_start: whether requests of an adapter may.
        """
        heads = [head for each in self._heaps if may_start(each) and (head := self._top(each))]
        return min(heads, key=lambda line: line.key()).requests[0] if heads else None

    def adapters(self) -> list[tuple[int, int]]:
        """Adapters with requests that wait, besides none, and the priority of the first; in the
        order in which these would start."""
        lines = {adapter: self._top(adapter) for adapter in self._heaps if adapter}
        heads = sorted((line.key(), adapter) for adapter, line in lines.items() if line)
        return [(adapter, key[0]) for key, adapter in heads]

    def _top(self, adapter: int) -> _Line | None:
        """The line that is next of those of an adapter."""
        heap = self._heaps[adapter]
        while heap:
            entry = heap[0]
            line = entry[2]
            if line.entry is not entry:
                heappop(heap)
                continue
            if entry[0] == line.key():
                return line
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

    def _push(self, line: _Line, adapter: int) -> None:
        heap = self._heaps.setdefault(adapter, [])
        heappush(heap, self._entry(line))
        if len(heap) > 2 * len(self._lines) + 16:
            # Mostly entries of lines that are gone.
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapify(heap)

    def _drop_heap_of(self, adapter: int) -> None:
        """Forgets the heap of an adapter that has no line any more."""
        if adapter and not any(entry[2].entry is entry for entry in self._heaps[adapter]):
            del self._heaps[adapter]

    def _entry(self, line: _Line) -> _Entry:
        """The one entry of a line that counts from now on."""
        line.entry = (line.key(), next(self._entry_numbers), line)
        return line.entry


def _order(request: Request) -> tuple[int, int]:
    return request.order
