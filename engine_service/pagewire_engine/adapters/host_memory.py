"""Which adapters' weights are in host memory: those wanted last, as many as the settings say."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pagewire.errors import FailedPreconditionError, InternalError, PagewireError
from pagewire_engine.adapters.description import AdapterDescription, AdapterFolder
from pagewire_engine.adapters.loaded import AdapterWorkers, LoadedAdapter

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Weights:
    """Of one adapter.

    Attributes:
        adapter: theirs.
        is_there: they are in host memory.
        is_kept: they must stay there.
        is_fetched: they are being read again.
        last_used: when they were last wanted, seconds of the monotonic clock.
    """

    adapter: LoadedAdapter
    is_there: bool = True
    is_kept: bool = False
    is_fetched: bool = False
    last_used: float = field(default_factory=time.monotonic)


class HostMemory:
    """Reads weights, and lets go of those that were wanted least recently for those that are now.

    Every method may be called from any thread.

    Args:
        workers: have the weights.
        max_adapters: at most so many are there, but for those that must stay.
        background: what is fetched again is read there.
        on_lost: told of an adapter whose weights can't be had any more, and why.
        on_fetched: weights that were waited for may be there.

    Attributes:
        reading: held by whoever reads: one adapter at a time, which bounds the memory that takes.
    """

    def __init__(
        self,
        workers: AdapterWorkers,
        max_adapters: int,
        background: ThreadPoolExecutor,
        on_lost: Callable[[LoadedAdapter, PagewireError], None],
        on_fetched: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._max_adapters = max_adapters
        self._background = background
        self._on_lost, self._on_fetched = on_lost, on_fetched
        self.reading = threading.Lock()
        self._lock = threading.Lock()
        self._weights: dict[int, _Weights] = {}
        self._num_evictions = 0

    @property
    def num_evictions(self) -> int:
        """Weights that had to leave for others, since the start."""
        return self._num_evictions

    def read(
        self, number: int, folder: AdapterFolder, *, makes_room: bool = True
    ) -> AdapterDescription:
        """Reads an adapter's weights; `add` or `drop` must follow. To be called under `reading`.

        Args:
            number: what it will be called; a new one.
            folder: its files.
            makes_room: not so where they may turn out to be there already: one too many may then
                be there, until `drop` or `trim`.

        Raises:
            PagewireError: it can't be served; the error says why.
        """
        if makes_room:
            self._make_room(1)
        return self._workers.load_adapter(number, folder)

    def add(self, adapter: LoadedAdapter) -> None:
        """What was read is an adapter that may be used from now on."""
        with self._lock:
            self._weights[adapter.number] = _Weights(adapter)

    def trim(self) -> None:
        """Lets go of weights until there are no more than may be. To be called under `reading`."""
        self._make_room(0)

    def drop(self, number: int) -> None:
        """Lets go of an adapter for ever. One that is not there is no error."""
        with self._lock:
            self._weights.pop(number, None)
        self._workers.drop_adapter(number)

    def want(self, number: int) -> None:
        """See AdapterStore."""
        with self._lock:
            weights = self._weights.get(number)
            if weights is None:
                return
            weights.is_kept, weights.last_used = True, time.monotonic()
            if weights.is_there or weights.is_fetched:
                return
            weights.is_fetched = True
        self._background.submit(self._fetch, weights)

    def let_go(self, number: int) -> None:
        """See AdapterStore."""
        with self._lock:
            if (weights := self._weights.get(number)) is not None:
                weights.is_kept, weights.last_used = False, time.monotonic()

    def is_ready(self, number: int) -> bool:
        """See AdapterStore."""
        weights = self._weights.get(number)
        return weights is not None and weights.is_there

    def kept(self) -> dict[int, bool]:
        """Adapters whose weights are there, and whether they must stay."""
        with self._lock:
            return {number: each.is_kept for number, each in self._weights.items() if each.is_there}

    def _fetch(self, weights: _Weights) -> None:
        """Reads an adapter again whose weights had to go."""
        adapter = weights.adapter
        failure: PagewireError | None = None
        try:
            with self.reading:
                self._read_again(adapter)
        except PagewireError as error:
            failure = error
        except Exception as error:
            logger.exception("Adapter %r could not be read again.", adapter.name)
            failure = InternalError(f"the adapter could not be read ({type(error).__name__})")
        with self._lock:
            # It may have been unloaded meanwhile: then nobody else lets go of what was read.
            is_gone = self._weights.get(adapter.number) is not weights
            weights.is_there = failure is None and not is_gone
            # Before the failure is told: a request that comes after it wants another attempt.
            weights.is_fetched = False
        if is_gone:
            self._workers.drop_adapter(adapter.number)
        elif failure is not None:
            self._on_lost(adapter, failure)
        self._on_fetched()

    def _read_again(self, adapter: LoadedAdapter) -> None:
        found = self.read(adapter.number, adapter.folder)
        if found.weights_version != adapter.description.weights_version:
            self._workers.drop_adapter(adapter.number)
            raise FailedPreconditionError(
                f"the files of the adapter {adapter.name!r} have changed since it was loaded; "
                "load it again, in_place",
                field="model",
            )

    def _make_room(self, places: int) -> None:
        """Lets go of weights until so many more fit, if those that must stay allow it."""
        with self._lock:
            there = [each for each in self._weights.values() if each.is_there]
            idle = sorted(
                (each for each in there if not each.is_kept), key=lambda each: each.last_used
            )
            leaving = idle[: max(0, len(there) + places - self._max_adapters)]
            for weights in leaving:
                weights.is_there = False
                self._num_evictions += 1
        for weights in leaving:
            self._workers.drop_adapter(weights.adapter.number)
