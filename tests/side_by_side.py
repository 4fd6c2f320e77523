"""How several processes of pytest share the tests (`make test`, by pytest-xdist).

Tests of real processes take most of the time and little of the processors: servers start, time
limits pass, a browser draws. Each of three lists of them is run in its order by one process, so
that faults are struck while a browser is busy, but never beside one another. All else is taken file
by file, since files make their models and grammars once for all their tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LISTS = (("tests/clients/", "tests/faults/"), ("tests/e2e/",), ("tests/ui/",))


class SideBySide(LoadScopeScheduling):
    """Hands lists and files out as they are collected: the long lists are early."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        for folders in LISTS:
            if nodeid.startswith(folders):
                return " ".join(folders)
        return nodeid.split("::", 1)[0]
