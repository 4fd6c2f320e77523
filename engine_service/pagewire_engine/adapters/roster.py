"""Which adapters there are, by name and by number, and how many requests hold each."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from pagewire.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
)
from pagewire.lora import checked_name
from pagewire_engine.adapters.errors import AdapterNotFoundError
from pagewire_engine.adapters.loaded import AdapterHold, LoadedAdapter, LoadRequest

# Between two looks whether an unload's caller still waits.
_LOOK_INTERVAL_S = 0.2
# What is kept of each outlives its weights in host memory. A list of so many is still one message.
_MOST_ADAPTERS = 4096


class Roster:
    """Every method may be called from any thread; several in one go under `changed`.

    Args:
        served_model_name: a name that no adapter may have.

    Attributes:
        changed: guards what is kept, and wakes who waits for an adapter's requests to end. A thread
            may take it again.
    """

    def __init__(self, served_model_name: str) -> None:
        self.changed = threading.Condition()
        self._served_model_name = served_model_name
        self._current: dict[str, LoadedAdapter] = {}
        self._by_number: dict[int, LoadedAdapter] = {}
        self._loading: dict[str, str] = {}
        # Differs from that of every other engine, and of this one's other lives.
        self._life = secrets.token_hex(8)
        self._num_changes = 0

    def begin_loading(self, request: LoadRequest) -> LoadedAdapter | None:
        """Keeps the name for a load, which `end_loading` ends. Returns what it may replace.

        Raises:
            InvalidArgumentError: the name can't be one.
            AlreadyExistsError: it is taken.
            FailedPreconditionError: it is being unloaded.
            ResourceExhaustedError: there are too many.
        """
        self._check_name(request.name)
        with self.changed:
            present = self._check_free(request)
            self._loading[request.name] = request.path
            self._num_changes += 1
        return present

    def end_loading(self, name: str) -> None:
        """The load has ended, well or not."""
        with self.changed:
            del self._loading[name]
            self._has_changed()

    def renew(self, present: LoadedAdapter, request: LoadRequest) -> bool:
        """Takes the path and parent of a load that found its content there. Returns whether the
        adapter still is."""
        with self.changed:
            if self._current.get(present.name) is not present or present.is_leaving:
                return False
            present.parent = request.base_model_name or self._served_model_name
            present.path = request.path
            return True

    def enter(
        self, adapter: LoadedAdapter, *, in_place: bool
    ) -> tuple[LoadedAdapter, LoadedAdapter | None]:
        """Makes it the one of its name.

        Returns:
            The one of that name now: the present one, where that is the same. And the version that
            it replaced, which no request may name any more.

        Raises:
            AlreadyExistsError: there is another, and it may not be replaced.
        """
        with self.changed:
            present = self._current.get(adapter.name)
            if present is not None:
                if present.version == adapter.version and not present.is_leaving:
                    present.parent, present.path = adapter.parent, adapter.path
                    present.folder, present.folder_state = adapter.folder, adapter.folder_state
                    return present, None
                if not in_place:
                    raise _taken(adapter.name)
            self._by_number[adapter.number] = adapter
            self._current[adapter.name] = adapter
            if present is not None:
                present.is_leaving = True
            return adapter, present

    def _check_name(self, name: str) -> None:
        try:
            checked_name(name)
        except ValueError as error:
            raise InvalidArgumentError("name", str(error)) from None
        if name == self._served_model_name:
            raise AlreadyExistsError(
                f"{name!r} is the served model's name; choose another", field="name"
            )

    def _check_free(self, request: LoadRequest) -> LoadedAdapter | None:
        name = request.name
        if name in self._loading:
            raise AlreadyExistsError(f"an adapter {name!r} is being loaded", field="name")
        present = self._current.get(name)
        if present is None:
            if len(self._current) + len(self._loading) >= _MOST_ADAPTERS:
                raise ResourceExhaustedError(
                    f"{_MOST_ADAPTERS} adapters are loaded, the most there may be; unload one",
                    field="name",
                )
            return None
        if present.is_leaving:
            raise FailedPreconditionError(
                f"the adapter {name!r} is being unloaded; try again later", field="name"
            )
        if not (request.in_place or request.version):
            raise _taken(name)
        return present

    def _has_changed(self) -> None:
        """What it tells is different now; to be called under the lock."""
        self._num_changes += 1
        self.changed.notify_all()

    def begin_leaving(self, name: str) -> tuple[LoadedAdapter, list[LoadedAdapter]]:
        """No request may name it any more. Returns it, and all versions that are held.

        Raises:
            AdapterNotFoundError: there is none of this name.
            FailedPreconditionError: it is being unloaded.
        """
        with self.changed:
            current = self._current.get(name)
            if current is None:
                raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="name")
            if current.is_leaving:
                raise FailedPreconditionError(
                    f"the adapter {name!r} is being unloaded already", field="name"
                )
            versions = [each for each in self._by_number.values() if each.name == name]
            current.is_leaving = True
            self._num_changes += 1
        return current, versions

    def stay(self, current: LoadedAdapter) -> None:
        """It does not leave after all, unless a load in place has replaced it meanwhile."""
        with self.changed:
            current.is_leaving = self._current.get(current.name) is not current
            self._num_changes += 1

    def wait_until_unused(
        self,
        versions: list[LoadedAdapter],
        timeout_s: float | None,
        still_wanted: Callable[[], bool],
        end_requests: Callable[[], None],
    ) -> None:
        """Returns when no request holds any of them.

        Args:
            versions: of one adapter.
            timeout_s: how long to wait; None: for ever.
            still_wanted: whether the caller still waits.
            end_requests: called before each look.

        Raises:
            DeadlineExceededError, RequestCancelledError: requests still use it.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Again and again: one that was about to be handed over comes after the others. Outside
            # of the lock, which the loop's thread takes while it holds its own.
            end_requests()
            with self.changed:
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
                self.changed.wait(rest_s)
            if not still_wanted():
                raise RequestCancelledError("the call was cancelled; the adapter stays")

    def is_abandoned(self, adapter: LoadedAdapter) -> bool:
        """Whether it is a replaced version that nobody holds any more."""
        with self.changed:
            is_replaced = self._current.get(adapter.name) is not adapter
            return is_replaced and adapter.is_leaving and not adapter.num_holds

    def remove(self, adapter: LoadedAdapter) -> bool:
        """Forgets an adapter that nobody holds. Returns whether it was there."""
        with self.changed:
            if self._by_number.pop(adapter.number, None) is None:
                return False
            if self._current.get(adapter.name) is adapter:
                del self._current[adapter.name]
            self._has_changed()
        return True

    def hold(self, name: str, version: str = "", *, resubmission: bool = False) -> AdapterHold:
        """See AdapterRegistry."""
        with self.changed:
            adapter = self._current.get(name)
            if adapter is None:
                raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="adapter")
            if version and adapter.version != version:
                adapter = self._held_version(name, version)
            elif adapter.is_leaving and not (resubmission and adapter.num_holds):
                raise FailedPreconditionError(
                    f"the adapter {name!r} is being unloaded", field="adapter"
                )
            adapter.num_holds += 1
            return AdapterHold(adapter.number, adapter.version, f"{name}\0{adapter.version}")

    def _held_version(self, name: str, version: str) -> LoadedAdapter:
        for each in self._by_number.values():
            if (each.name, each.version) == (name, version) and each.num_holds:
                return each
        raise FailedPreconditionError(
            f"the adapter {name!r} is not loaded in the version {version:.12} that this request "
            "began with; send it again",
            field="adapter",
        )

    def release(self, number: int) -> LoadedAdapter:
        """A request that held the adapter has ended."""
        with self.changed:
            adapter = self._by_number[number]
            adapter.num_holds -= 1
            self.changed.notify_all()
        return adapter

    def revision(self) -> str:
        """Differs as soon as other adapters may be named, or one in another version."""
        return f"{self._life}-{self._num_changes}"

    def adapters(self) -> list[LoadedAdapter]:
        """Those that are loaded, by name; a replaced version follows its heir."""
        with self.changed:
            return sorted(self._by_number.values(), key=lambda each: (each.name, -each.number))

    def loading(self) -> dict[str, str]:
        """Names and paths of those that are being read."""
        with self.changed:
            return dict(self._loading)

    def files_of(self, name: str, version: str = "") -> Mapping[str, bytes]:
        """See AdapterRegistry."""
        with self.changed:
            adapter = self._current.get(name)
        if adapter is None:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded", field="adapter")
        if version not in ("", adapter.version):
            raise FailedPreconditionError(
                f"the adapter {name!r} has another version now", field="adapter_version"
            )
        return adapter.files


def _taken(name: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"an adapter {name!r} is loaded; replace it with in_place, or choose another name",
        field="name",
    )
