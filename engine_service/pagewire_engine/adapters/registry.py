"""Loads adapters, lets requests hold them, and unloads them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from pagewire.errors import FailedPreconditionError, PagewireError, ResourceExhaustedError
from pagewire_engine.adapters.compatible_tokenizer import check_tokenizer
from pagewire_engine.adapters.description import AdapterMemory
from pagewire_engine.adapters.files import folder_state, tokenizer_files
from pagewire_engine.adapters.host_memory import HostMemory
from pagewire_engine.adapters.loaded import (
    AdapterHold,
    AdapterWorkers,
    LoadedAdapter,
    LoadRequest,
    Unloaded,
    version_of,
)
from pagewire_engine.adapters.roster import Roster

logger = logging.getLogger(__name__)

# Of the tokenizers and templates that they ship, where those are not the model's own.
_MOST_FILE_BYTES = 256 << 20


class AdapterRegistry:
    """Loads and unloads adapters. Every method may be called from any thread.

    It is the AdapterStore of the scheduler's turns. Of at most `max_cpu_loras` the weights are in
    host memory (see HostMemory).

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
        self._tokenizer_files = tokenizer_files
        self._vocab_size = vocab_size
        self._roster = Roster(served_model_name)
        self._numbers = itertools.count(1)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._host = HostMemory(
            workers, max_cpu_loras, self._background, self._tell_loss, lambda: self._wake()
        )
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
        self._background.shutdown(cancel_futures=True)

    def load(self, request: LoadRequest) -> LoadedAdapter:
        """Reads and checks an adapter; returns when requests may name it.

        Raises:
            InvalidArgumentError: the name can't be one.
            AlreadyExistsError: it is taken.
            PagewireError: the adapter can't be served; the error says why.
        """
        present = self._roster.begin_loading(request)
        try:
            with self._host.reading:
                if present is not None and self._is_unchanged(present, request):
                    return present
                return self._read(request, makes_room=present is None)
        finally:
            self._roster.end_loading(request.name)

    def _is_unchanged(self, present: LoadedAdapter, request: LoadRequest) -> bool:
        """Whether what is asked for is there, by all that can be told without reading it."""
        if request.folder != present.folder or request.version not in ("", present.version):
            return False
        if present.folder_state is None or folder_state(request.folder) != present.folder_state:
            return False
        return self._roster.renew(present, request)

    def _read(self, request: LoadRequest, *, makes_room: bool) -> LoadedAdapter:
        name, number = request.name, next(self._numbers)
        state = folder_state(request.folder)
        description = self._host.read(number, request.folder, makes_room=makes_room)
        try:
            files = self._own_files(request)
            version = version_of(description, files)
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
                folder_state=state,
                path=request.path,
                parent=request.base_model_name or self._served_model_name,
                version=version,
                description=description,
                files=files,
                from_settings=request.from_settings,
            )
            self._host.add(adapter)
            entered = self._enter(adapter, request)
        except BaseException:
            self._host.drop(number)
            raise
        if entered is not adapter:
            self._host.drop(number)
            return entered
        self._host.trim()
        logger.info("loaded adapter %r from %s, version %.12s", name, request.path, version)
        return adapter

    def _own_files(self, request: LoadRequest) -> Mapping[str, bytes]:
        """What the adapter ships of a tokenizer, checked; files that are the model's take no memory
        of their own."""
        files = tokenizer_files(request.folder)
        check_tokenizer(files, self._tokenizer_files, self._vocab_size)
        for name, content in files.items():
            if content == self._tokenizer_files.get(name):
                files[name] = self._tokenizer_files[name]
        others = [each.files for each in self._roster.adapters()]
        num_bytes = sum(map(self._num_own_bytes, [*others, files]))
        if num_bytes > _MOST_FILE_BYTES and self._num_own_bytes(files):
            raise ResourceExhaustedError(
                f"the tokenizers and chat templates that the loaded adapters ship would have "
                f"{num_bytes >> 20} MiB with this one's, and at most {_MOST_FILE_BYTES >> 20} MiB "
                "are kept; unload others, or remove its tokenizer.json where it is the model's",
                field="path",
            )
        return files

    def _num_own_bytes(self, files: Mapping[str, bytes]) -> int:
        return sum(
            len(content)
            for name, content in files.items()
            if content is not self._tokenizer_files.get(name)
        )

    def _enter(self, adapter: LoadedAdapter, request: LoadRequest) -> LoadedAdapter:
        """Makes it the one of its name; returns the present one where that is the same."""
        with self._roster.changed:
            entered, replaced = self._roster.enter(adapter, in_place=request.in_place)
            if replaced is not None:
                self._retire_if_unused(replaced)
        return entered

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
        current, versions = self._roster.begin_leaving(name)
        ended: list[int] = []

        def end_requests() -> None:
            if ends_requests and self._fail is not None:
                told = FailedPreconditionError(f"the adapter {name!r} was unloaded", field="model")
                for adapter in versions:
                    self._fail(adapter.number, told, ended.append)

        try:
            self._roster.wait_until_unused(versions, timeout_s, still_wanted, end_requests)
        except BaseException:
            with self._roster.changed:
                self._roster.stay(current)
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

    def _retire_if_unused(self, adapter: LoadedAdapter) -> None:
        """Lets a replaced version go, later and elsewhere: a step may be under way."""
        if self._roster.is_abandoned(adapter):
            self._background.submit(self._retire, adapter)

    def _retire(self, adapter: LoadedAdapter) -> bool:
        """Forgets an adapter that nobody holds. Returns whether it was there."""
        if not self._roster.remove(adapter):
            return False
        self._host.drop(adapter.number)
        return True

    def hold(self, name: str, version: str = "", *, resubmission: bool = False) -> AdapterHold:
        """For a request that names an adapter. To be released once, when it has ended.

        Args:
            name: the adapter's.
            version: which; "": the present one.
            resubmission: the request was admitted before: it may go on with an adapter that is
                being unloaded, as long as others do.

        Raises:
            AdapterNotFoundError: there is none of this name.
            FailedPreconditionError: not in this version, or it is being unloaded.
        """
        return self._roster.hold(name, version, resubmission=resubmission)

    def release(self, number: int) -> None:
        """A request that held the adapter has ended."""
        with self._roster.changed:
            self._retire_if_unused(self._roster.release(number))

    def want(self, number: int) -> None:
        """See AdapterStore."""
        self._host.want(number)

    def let_go(self, number: int) -> None:
        """See AdapterStore."""
        self._host.let_go(number)

    def is_ready(self, number: int) -> bool:
        """See AdapterStore."""
        return self._host.is_ready(number)

    def _tell_loss(self, adapter: LoadedAdapter, error: PagewireError) -> None:
        logger.error("adapter %r can't be used any more: %s", adapter.name, error.message)
        told = FailedPreconditionError(error.message, field="model")
        if self._fail is not None:
            self._fail(adapter.number, told, lambda count: None)

    def revision(self) -> str:
        """Differs as soon as other adapters may be named, or one in another version."""
        return self._roster.revision()

    def adapters(self) -> list[LoadedAdapter]:
        """Those that are loaded, by name; a replaced version follows its heir."""
        return self._roster.adapters()

    def loading(self) -> dict[str, str]:
        """Names and paths of those that are being read."""
        return self._roster.loading()

    def files_of(self, name: str, version: str = "") -> Mapping[str, bytes]:
        """The tokenizer's files that an adapter ships.

        Raises:
            AdapterNotFoundError: there is none of this name.
            FailedPreconditionError: not in this version.
        """
        return self._roster.files_of(name, version)

    def memory(self) -> AdapterMemory:
        """Where their weights are."""
        return self._workers.adapter_memory()

    @property
    def num_evictions(self) -> int:
        """Weights that had to leave host memory for others, since the start."""
        return self._host.num_evictions
