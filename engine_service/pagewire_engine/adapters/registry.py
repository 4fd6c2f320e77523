"""Which adapters are loaded, who uses them, and which of them are in host memory."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    PagewireError,
    RequestCancelledError,
)
from pagewire.lora import checked_name
from pagewire_engine.adapters.compatible_tokenizer import check_tokenizer
from pagewire_engine.adapters.description import (
    AdapterDescription,
    AdapterFolder,
    AdapterMemory,
)
from pagewire_engine.adapters.errors import AdapterNotFoundError
from pagewire_engine.adapters.files import tokenizer_files

logger = logging.getLogger(__name__)

# Between two looks whether an unload's caller still waits.
_LOOK_INTERVAL_S = 0.2


class AdapterWorkers(Protocol):
    """The part of Executor that has to do with adapters."""

    def load_adapter(self, number: int, folder: AdapterFolder) -> AdapterDescription: ...

    def drop_adapter(self, number: int) -> None: ...

    def adapter_memory(self) -> AdapterMemory: ...


@dataclass(frozen=True, slots=True)
class AdapterHold:
    """An adapter that a request holds until it has ended.

    Attributes:
        number: the engine's.
        version: in force.
        cache_key: what tells its keys and values from those of others.
    """

    number: int
    version: str
    cache_key: str


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One version of an adapter.

    Attributes:
        number: the engine's, never used again.
        name: what requests call it.
        folder: its files.
        path: its folder as it was named.
        parent: the model it was trained on.
        version: SHA-256 (hex) of its content.
        description: what its files say.
        files: of a tokenizer that it ships.
        from_settings: loaded when the engine started.
        loaded_at: Unix time, seconds.
        num_holds: requests that hold it.
        is_leaving: no request may name it any more.
        is_there: its weights are in host memory.
        is_kept: they must stay there.
        is_fetched: they are being read again.
        last_used: when its weights were last wanted, seconds of the monotonic clock.
    """

    number: int
    name: str
    folder: AdapterFolder
    path: str
    parent: str
    version: str
    description: AdapterDescription
    files: Mapping[str, bytes]
    from_settings: bool
    loaded_at: int = field(default_factory=lambda: int(time.time()))
    num_holds: int = 0
    is_leaving: bool = False
    is_there: bool = True
    is_kept: bool = False
    is_fetched: bool = False
    last_used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload has done.

    Attributes:
        num_ended: requests that it ended.
        host_bytes, device_bytes: memory that came back.
    """

    num_ended: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be loaded.

    Attributes:
        name: what requests will call it.
        folder: its files.
        path: its folder as the caller named it.
        base_model_name: the model it was trained on; "": the served model.
        in_place: replace the adapter of this name.
        version: refuse content of another; "": take any.
        from_settings: loaded when the engine starts.
    """

    name: str
    folder: AdapterFolder
    path: str
    base_model_name: str = ""
    in_place: bool = False
    version: str = ""
    from_settings: bool = False


class AdapterRegistry:
    """Loads and unloads adapters. Every method may be called from any thread.

    Host memory holds the weights of at most `max_cpu_loras`; those that were wanted least recently
    go first, and are read again when a request that names them comes up. It is the AdapterStore of
    the scheduler's turns.

    Args:
        workers: have the weights.
        served_model_name: a name that no adapter may have.
        max_cpu_loras: see above.
        tokenizer_files: the model's, with which an adapter's must agree.
        vocab_size: the model's.
    """

    def __init__(
        self,
        workers: AdapterWorkers,
        *,
        served_model_name: str,
        max_cpu_loras: int,
        tokenizer_files: Mapping[str, bytes],
        vocab_size: int,
    ) -> None:
        self._workers = workers
        self._served_model_name = served_model_name
        self._max_cpu_loras = max_cpu_loras
        self._tokenizer_files = tokenizer_files
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._current: dict[str, LoadedAdapter] = {}
        self._by_number: dict[int, LoadedAdapter] = {}
        self._loading: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._num_evictions = 0
        # One adapter is read at a time: the memory that takes is bounded so.
        self._reading = threading.Lock()
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._fail: Callable[[int, PagewireError, Callable[[int], None]], None] | None = None
        self._wake: Callable[[], None] = lambda: None

    def attach(
        self,
        fail: Callable[[int, PagewireError, Callable[[int], None]], None],
        wake: Callable[[], None],
    ) -> None:
        """Tells it of the loop.

        Args:
            fail: fails all requests of an adapter; told how many.
            wake: weights that were waited for may be there.
        """
        self._fail, self._wake = fail, wake

    def close(self) -> None:
        """Ends its thread. Safe to call twice."""
        self._fetcher.shutdown(cancel_futures=True)

    # -- loading -----------------------------------------------------------------------------

    def load(self, request: LoadRequest) -> LoadedAdapter:
        """Reads and checks an adapter; returns when requests may name it.

        Raises:
            InvalidArgumentError: the name can't be one.
            AlreadyExistsError: it is taken.
            PagewireError: the adapter can't be served; the error says why.
        """
        name = self._checked_name(request.name)
        with self._changed:
            self._check_free(request)
            self._loading[name] = request.path
        try:
            with self._reading:
                return self._read(request)
        finally:
            with self._changed:
                del self._loading[name]
                self._changed.notify_all()

    def _read(self, request: LoadRequest) -> LoadedAdapter:
        name, number = request.name, next(self._numbers)
        self._make_room()
        description = self._workers.load_adapter(number, request.folder)
        try:
            files = tokenizer_files(request.folder)
            check_tokenizer(files, self._tokenizer_files, self._vocab_size)
            version = _version(description, files)
            if request.version not in ("", version):
                raise FailedPreconditionError(
                    f"the folder holds version {version}, and not the {request.version} that is "
                    "asked for",
                    field="version",
                )
            adapter = LoadedAdapter(
                number=number,
                name=name,
                folder=request.folder,
                path=request.path,
                parent=request.base_model_name or self._served_model_name,
                version=version,
                description=description,
                files=files,
                from_settings=request.from_settings,
            )
            with self._changed:
                entered = self._enter(adapter, request)
        except BaseException:
            self._workers.drop_adapter(number)
            raise
        if entered is not adapter:
            self._workers.drop_adapter(number)
            return entered
        self._make_room(0)
        logger.info("loaded adapter %r from %s, version %.12s", name, request.path, version)
        return adapter

    def _enter(self, adapter: LoadedAdapter, request: LoadRequest) -> LoadedAdapter:
        """Makes it the one of its name; returns the present one where that is the same."""
        present = self._current.get(adapter.name)
        if present is not None and present.version == adapter.version and not present.is_leaving:
            present.parent, present.path = adapter.parent, adapter.path
            present.folder = adapter.folder
            return present
        if present is not None and not request.in_place:
            raise self._taken(adapter.name)
        self._by_number[adapter.number] = adapter
        self._current[adapter.name] = adapter
        if present is not None:
            present.is_leaving = True
            self._retire_if_unused(present)
        return adapter

    def _checked_name(self, name: str) -> str:
        try:
            checked_name(name)
        except ValueError as error:
            raise InvalidArgumentError("name", str(error)) from None
        if name == self._served_model_name:
            raise AlreadyExistsError(
                f"{name!r} is the served model's name; choose another", field="name"
            )
        return name

    def _check_free(self, request: LoadRequest) -> None:
        name = request.name
        if name in self._loading:
            raise AlreadyExistsError(f"an adapter {name!r} is being loaded", field="name")
        present = self._current.get(name)
        if present is None:
            return
        if present.is_leaving:
            raise FailedPreconditionError(
                f"the adapter {name!r} is being unloaded; try again later", field="name"
            )
        if not (request.in_place or request.version):
            raise self._taken(name)

    def _taken(self, name: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f"an adapter {name!r} is loaded; replace it with in_place, or choose another name",
            field="name",
        )

    # -- unloading ---------------------------------------------------------------------------

    def unload(
        self,
        name: str,
        *,
        ends_requests: bool,
        timeout_s: float | None = None,
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> Unloaded:
        """Takes an adapter away, in all its versions, when nobody uses it any more.

        Args:
            name: its name.
            ends_requests: end those that use it, and do not wait for them.
            timeout_s: how long to wait for them; None: for ever.
            still_wanted: whether the caller still waits.

        Raises:
            AdapterNotFoundError: there is none of this name.
            FailedPreconditionError: it is being unloaded.
            DeadlineExceededError, RequestCancelledError: requests still used it; it stays.
        """
        with self._changed:
            current = self._present(name)
            versions = [each for each in self._by_number.values() if each.name == name]
            current.is_leaving = True
        ended: list[int] = []

        def end_requests() -> None:
            if ends_requests and self._fail is not None:
                told = FailedPreconditionError(f"the adapter {name!r} was unloaded", field="model")
                for adapter in versions:
                    self._fail(adapter.number, told, ended.append)

        try:
            self._wait_until_unused(versions, timeout_s, still_wanted, end_requests)
        except BaseException:
            with self._changed:
                # A load in place may have replaced it meanwhile: then it leaves all the same.
                current.is_leaving = self._current.get(name) is not current
                self._retire_if_unused(current)
            raise
        memory = self._workers.adapter_memory()
        freed = [each for each in versions if self._retire(each)]
        logger.info("unloaded adapter %r", name)
        return Unloaded(
            num_ended=sum(ended),
            host_bytes=sum(
                each.description.num_bytes for each in freed if each.number in memory.host
            ),
            device_bytes=sum(memory.device.get(each.number, 0) for each in freed),
        )

    def _present(self, name: str) -> LoadedAdapter:
        current = self._current.get(name)
        if current is None:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="name")
        if current.is_leaving:
            raise FailedPreconditionError(
                f"the adapter {name!r} is being unloaded already", field="name"
            )
        return current

    def _wait_until_unused(
        self,
        versions: list[LoadedAdapter],
        timeout_s: float | None,
        still_wanted: Callable[[], bool],
        end_requests: Callable[[], None],
    ) -> None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Again and again: one that was about to be handed over comes after the others. Outside
            # of the lock, which the loop's thread takes while it holds its own.
            end_requests()
            with self._changed:
                num_holds = sum(each.num_holds for each in versions)
                if not num_holds:
                    return
                rest_s = min(_LOOK_INTERVAL_S, deadline - time.monotonic())
                if rest_s <= 0:
                    raise DeadlineExceededError(
                        f"{num_holds} requests still use the adapter after {timeout_s:g} s; it "
                        "stays. End them by MODE_ABORT, or wait longer",
                        field="timeout_s",
                    )
                self._changed.wait(rest_s)
            if not still_wanted():
                raise RequestCancelledError("the call was cancelled; the adapter stays")

    def _retire_if_unused(self, adapter: LoadedAdapter) -> None:
        """Lets a replaced version go, later and elsewhere: a step may be under way."""
        is_replaced = self._current.get(adapter.name) is not adapter
        if is_replaced and adapter.is_leaving and not adapter.num_holds:
            self._fetcher.submit(self._retire, adapter)

    def _retire(self, adapter: LoadedAdapter) -> bool:
        """Forgets an adapter that nobody holds. Returns whether it was there."""
        with self._changed:
            if self._by_number.pop(adapter.number, None) is None:
                return False
            if self._current.get(adapter.name) is adapter:
                del self._current[adapter.name]
            self._changed.notify_all()
        self._workers.drop_adapter(adapter.number)
        return True

    # -- requests ----------------------------------------------------------------------------

    def hold(self, name: str, version: str = "") -> AdapterHold:
        """For a request that names an adapter. To be released once, when it has ended.

        Args:
            name: the adapter's.
            version: which; "": the present one.

        Raises:
            AdapterNotFoundError: there is none of this name.
            FailedPreconditionError: not in this version, or it is being unloaded.
        """
        with self._changed:
            adapter = self._current.get(name)
            if adapter is None:
                raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="adapter")
            if version and adapter.version != version:
                adapter = next(
                    (
                        each
                        for each in self._by_number.values()
                        if (each.name, each.version) == (name, version) and each.num_holds
                    ),
                    None,
                )
                if adapter is None:
                    raise FailedPreconditionError(
                        f"the adapter {name!r} is not loaded in the version {version:.12} that "
                        "this request began with; send it again",
                        field="adapter",
                    )
            elif adapter.is_leaving:
                raise FailedPreconditionError(
                    f"the adapter {name!r} is being unloaded", field="adapter"
                )
            adapter.num_holds += 1
            return AdapterHold(adapter.number, adapter.version, f"{name}\0{adapter.version}")

    def release(self, number: int) -> None:
        """A request that held the adapter has ended."""
        with self._changed:
            adapter = self._by_number[number]
            adapter.num_holds -= 1
            self._changed.notify_all()
            self._retire_if_unused(adapter)

    # -- host memory: AdapterStore -----------------------------------------------------------

    def want(self, number: int) -> None:
        """See AdapterStore."""
        with self._changed:
            adapter = self._by_number.get(number)
            if adapter is None:
                return
            adapter.is_kept, adapter.last_used = True, time.monotonic()
            if adapter.is_there or adapter.is_fetched:
                return
            adapter.is_fetched = True
        self._fetcher.submit(self._fetch, adapter)

    def let_go(self, number: int) -> None:
        """See AdapterStore."""
        with self._changed:
            if (adapter := self._by_number.get(number)) is not None:
                adapter.is_kept, adapter.last_used = False, time.monotonic()

    def is_ready(self, number: int) -> bool:
        """See AdapterStore."""
        adapter = self._by_number.get(number)
        return adapter is not None and adapter.is_there

    def _fetch(self, adapter: LoadedAdapter) -> None:
        """Reads an adapter again whose weights had to go."""
        failure: PagewireError | None = None
        try:
            self._read_again(adapter)
        except PagewireError as error:
            failure = error
        except Exception as error:
            logger.exception("Adapter %r could not be read again.", adapter.name)
            failure = InternalError(f"the adapter could not be read ({type(error).__name__})")
        with self._changed:
            # It may have been unloaded meanwhile: then nobody else lets go of what was read.
            is_gone = self._by_number.get(adapter.number) is not adapter
            adapter.is_there = failure is None and not is_gone
            # Before the failure is told: a request that comes after it wants another attempt.
            adapter.is_fetched = False
        if is_gone:
            self._workers.drop_adapter(adapter.number)
        elif failure is not None:
            self._tell_failure(adapter, failure)
        self._wake()

    def _read_again(self, adapter: LoadedAdapter) -> None:
        with self._reading:
            self._make_room()
            found = self._workers.load_adapter(adapter.number, adapter.folder)
        if found.weights_version != adapter.description.weights_version:
            self._workers.drop_adapter(adapter.number)
            raise FailedPreconditionError(
                f"the files of the adapter {adapter.name!r} have changed since it was loaded; "
                "load it again, in_place",
                field="model",
            )

    def _tell_failure(self, adapter: LoadedAdapter, error: PagewireError) -> None:
        logger.error("adapter %r can't be used any more: %s", adapter.name, error.message)
        told = FailedPreconditionError(error.message, field="model")
        if self._fail is not None:
            self._fail(adapter.number, told, lambda count: None)

    def _make_room(self, places: int = 1) -> None:
        """Lets go of weights until so many more fit, if those that must stay allow it."""
        with self._changed:
            there = [each for each in self._by_number.values() if each.is_there]
            idle = sorted(
                (each for each in there if not each.is_kept), key=lambda each: each.last_used
            )
            leaving = idle[: max(0, len(there) + places - self._max_cpu_loras)]
            for adapter in leaving:
                adapter.is_there = False
                self._num_evictions += 1
        for adapter in leaving:
            self._workers.drop_adapter(adapter.number)

    # -- what it tells -----------------------------------------------------------------------

    def adapters(self) -> list[LoadedAdapter]:
        """Those that are loaded, by name; a replaced version follows its heir."""
        with self._changed:
            return sorted(self._by_number.values(), key=lambda each: (each.name, -each.number))

    def loading(self) -> dict[str, str]:
        """Names and paths of those that are being read."""
        with self._changed:
            return dict(self._loading)

    def files_of(self, name: str) -> Mapping[str, bytes]:
        """The tokenizer's files that an adapter ships.

        Raises:
            AdapterNotFoundError: there is none of this name.
        """
        with self._changed:
            adapter = self._current.get(name)
        if adapter is None:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="adapter")
        return adapter.files

    def memory(self) -> AdapterMemory:
        """Where their weights are."""
        return self._workers.adapter_memory()

    @property
    def num_evictions(self) -> int:
        """Weights that had to leave host memory for others, since the start."""
        return self._num_evictions


def _version(description: AdapterDescription, files: Mapping[str, bytes]) -> str:
    """Of an adapter's whole content."""
    digest = hashlib.sha256(description.weights_version.encode())
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
