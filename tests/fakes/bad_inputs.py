"""How much that is wrong was sent to what is tested; pytest tells it at the end."""

from __future__ import annotations

from collections import Counter

tried: Counter[str] = Counter()
"""By kind."""
