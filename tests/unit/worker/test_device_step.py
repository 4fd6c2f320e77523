"""What becomes of a step on a device that fails."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pagewire.errors import UnavailableError
from pagewire_engine.worker.device_step import DeviceStep
from pagewire_engine.worker.staging import Download


class FailingDownload:
    taken = 0

    def take(self) -> Any:
        self.taken += 1
        raise RuntimeError("an illegal memory access")


def test_a_step_that_failed_is_not_landed_again() -> None:
    pytest.importorskip("triton")
    download = FailingDownload()
    step = DeviceStep(7, download=cast("Download", download))
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"step 7: an illegal memory access"):
            step.result()
    assert download.taken == 1
