"""The time that chat templates are told, as it was where the reference rendered them."""

from __future__ import annotations

from datetime import datetime

import pytest

from pagewire_frontend import template_budget


def freeze_template_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates see 2025-01-02 03:04:05."""

    class FrozenBudget(template_budget.Budget):
        def __init__(self) -> None:
            super().__init__()
            self.now = datetime(2025, 1, 2, 3, 4, 5)

    monkeypatch.setattr(template_budget, "Budget", FrozenBudget)
