"""How many requests a client may make: by the minute, and at a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from pagewire.errors import ResourceExhaustedError

# Whoever frees a place is not known: soon enough, and not at once.
_BUSY_RETRY_S = 1.0


class RequestLimits:
    """Limits of one process, by tenant.

    Args:
        per_minute: requests of a tenant; as many may come at once after a minute of silence. None:
            any number.
        concurrent: requests of a tenant that may be under way; None: any number.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        per_minute: int | None = None,
        concurrent: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = per_minute
        self._concurrent = concurrent
        self._clock = clock
        # When the last of a tenant's requests would have been due, had they come evenly: the
        # generic cell rate algorithm (ITU-T I.371). Oldest first; who is not here has been silent.
        self._due_at: OrderedDict[str, float] = OrderedDict()
        self._under_way: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """Counts a request that begins; `leave` when it has ended.

        Raises:
            ResourceExhaustedError: it is one too many. It does not count.
        """
        under_way = self._under_way.get(tenant, 0)
        if self._concurrent is not None and under_way >= self._concurrent:
            raise ResourceExhaustedError(
                f"{under_way} requests of this client are under way, the most at a time "
                "(--max-concurrent-requests)",
                retry_after_s=_BUSY_RETRY_S,
            )
        if self._per_minute is not None:
            self._count(tenant, self._per_minute)
        self._under_way[tenant] = under_way + 1

    def leave(self, tenant: str) -> None:
        """A request that had entered has ended."""
        left = self._under_way[tenant] - 1
        if left:
            self._under_way[tenant] = left
        else:
            del self._under_way[tenant]

    def _count(self, tenant: str, per_minute: int) -> None:
        now = self._clock()
        interval_s = 60.0 / per_minute
        due_at = max(self._due_at.get(tenant, now), now) + interval_s
        wait_s = due_at - now - 60.0
        if wait_s > 1e-6:
            raise ResourceExhaustedError(
                f"this client has made its {per_minute} requests of this minute "
                "(--max-requests-per-minute)",
                retry_after_s=wait_s,
            )
        self._due_at[tenant] = due_at
        self._due_at.move_to_end(tenant)
        while self._due_at:
            oldest, due_at = next(iter(self._due_at.items()))
            if due_at > now:
                break
            del self._due_at[oldest]
