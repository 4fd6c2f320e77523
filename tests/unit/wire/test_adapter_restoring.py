"""What a frontend asks of an engine that is back, and makes of its answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagewire.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    PagewireError,
    ResourceExhaustedError,
)
from pagewire.v1 import engine_pb2
from pagewire_frontend.engine_client import adapter_restoring
from pagewire_frontend.engine_client.adapter_restoring import RememberedAdapters
from pagewire_frontend.engine_client.control import ControlChannel

State = engine_pb2.AdapterInfo.State
LOADING = engine_pb2.AdapterInfo(name="a", path="a", state=State.STATE_LOADING)
BUSY = AlreadyExistsError("an adapter 'a' is being loaded", field="name")
FULL = ResourceExhaustedError("too many calls")


def adapter(version: str = "1", **fields: Any) -> engine_pb2.AdapterInfo:
    return engine_pb2.AdapterInfo(
        name="a", path="a", version=version, state=State.STATE_HOST, **fields
    )


class Control(ControlChannel):
    """Gives the answers that it is told, the last of each again and again."""

    def __init__(
        self,
        loads: list[engine_pb2.AdapterInfo | PagewireError],
        lists: list[list[engine_pb2.AdapterInfo]],
    ) -> None:
        self.loads, self.lists = loads, lists
        self.num_loads = 0

    async def load_adapter(
        self, request: engine_pb2.LoadAdapterRequest, *, timeout_s: float = 0.0
    ) -> engine_pb2.AdapterInfo:
        self.num_loads += 1
        answer = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        if isinstance(answer, PagewireError):
            raise answer
        return answer

    async def list_adapters(self, unless_revision: str = "") -> engine_pb2.ListAdaptersResponse:
        adapters = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return engine_pb2.ListAdaptersResponse(adapters=adapters)


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> RememberedAdapters:
    monkeypatch.setattr(adapter_restoring, "_MIN_RETRY_S", 0.0)
    remembered = RememberedAdapters()
    remembered.note_loaded(adapter())
    return remembered


def versions(remembered: RememberedAdapters) -> dict[str, str]:
    return {name: info.version for name, info in remembered._adapters.items()}


async def test_an_adapter_that_another_frontend_restores_is_waited_for(
    remembered: RememberedAdapters, caplog: pytest.LogCaptureFixture
) -> None:
    control = Control([BUSY], [[LOADING], [LOADING], [LOADING], [adapter()]])
    await remembered.restore(control, 60.0)
    assert (control.num_loads, versions(remembered)) == (3, {"a": "1"})
    assert not caplog.records


@pytest.mark.parametrize("refusal", [BUSY, FULL])
async def test_a_load_that_came_at_a_bad_time_is_tried_again(
    remembered: RememberedAdapters, refusal: PagewireError
) -> None:
    control = Control([refusal, adapter()], [[]])
    await remembered.restore(control, 60.0)
    assert (control.num_loads, versions(remembered)) == (2, {"a": "1"})


async def test_the_wait_for_others_has_an_end(remembered: RememberedAdapters) -> None:
    await remembered.restore(Control([BUSY], [[LOADING]]), -1.0)
    assert not versions(remembered)


@pytest.mark.parametrize("version", ["1", "2"])
async def test_adapters_of_the_engine_s_settings_are_not_sent_to_it(
    remembered: RememberedAdapters, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    remembered.note_loaded(adapter(from_settings=True))
    refusal = InvalidArgumentError("path", "leads out of --lora-dir")
    control = Control([refusal], [[adapter(version, from_settings=True)]])
    await remembered.restore(control, 60.0)
    assert (control.num_loads, versions(remembered)) == (0, {"a": version})
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_load_in_place_of_one_of_the_settings_is_restored(
    remembered: RememberedAdapters,
) -> None:
    control = Control([adapter()], [[adapter("0", from_settings=True)]])
    await remembered.restore(control, 60.0)
    assert control.num_loads == 1
