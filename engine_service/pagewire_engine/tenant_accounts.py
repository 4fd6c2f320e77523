"""What each tenant has been served: the counters of fair queueing.

The Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024,
arXiv 2401.00588), which is start-time fair queueing (Goyal et al., SIGCOMM 1996) for requests whose
cost is known only as they go: whoever has been served least is next; served is what was computed of
its prompts, and what it was given as output.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

# The paper's weights: an output token costs about two prompt tokens.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
# Tenants that are remembered while none of their requests waits.
_MOST_IDLE_ACCOUNTS = 1024


@dataclass(slots=True, eq=False)
class TenantAccount:
    """A tenant's counter.

    Attributes:
        tenant: its name.
        service: what it has been served, in prompt tokens. Only ever grows.
        num_waiting: its requests in the waiting queue.
    """

    tenant: str
    service: int = 0
    num_waiting: int = 0


class TenantAccounts:
    """The accounts of the tenants whose requests wait, and of those that may come back.

    Args:
        burst: what a tenant that comes back may be behind the others, in prompt tokens. The paper
            has none; but then a tenant far below its share that sends two requests at a time has to
            wait with the second until a flood has been served as much as the first was.
    """

    def __init__(self, burst: int = 0) -> None:
        self._burst = burst
        self._waiting: dict[str, TenantAccount] = {}
        self._idle: dict[str, TenantAccount] = {}
        self._last_to_leave: TenantAccount | None = None

    @property
    def num_waiting_tenants(self) -> int:
        """Tenants with a request in the waiting queue."""
        return len(self._waiting)

    def num_waiting(self, tenant: str) -> int:
        """Requests of a tenant in the waiting queue. Safe from any thread."""
        account = self._waiting.get(tenant)
        return 0 if account is None else account.num_waiting

    def enter(self, tenant: str) -> TenantAccount:
        """Counts one more waiting request of a tenant, and returns its account.

        A tenant that had none waiting gets no credit for that time but for `burst`: its counter is
        lifted to the least of those that wait or, where none does, to that of the last one that
        did.
        """
        account = self._waiting.get(tenant)
        if account is None:
            account = self._idle.pop(tenant, None) or TenantAccount(tenant)
            account.service = max(account.service, self._floor() - self._burst)
            self._waiting[tenant] = account
        account.num_waiting += 1
        return account

    def leave(self, account: TenantAccount) -> None:
        """Counts one waiting request less: it starts, or has ended."""
        account.num_waiting -= 1
        if account.num_waiting:
            return
        del self._waiting[account.tenant]
        self._idle[account.tenant] = self._last_to_leave = account
        if len(self._idle) > 2 * _MOST_IDLE_ACCOUNTS:
            self._forget()

    def _floor(self) -> int:
        if self._waiting:
            return min(account.service for account in self._waiting.values())
        return 0 if self._last_to_leave is None else self._last_to_leave.service

    def _forget(self) -> None:
        """Drops the idle accounts that have been served least. Who is below the floor loses nothing
        by it; of the others, those with the smallest debt are let off."""
        kept = nlargest(_MOST_IDLE_ACCOUNTS, self._idle.values(), key=lambda each: each.service)
        self._idle = {account.tenant: account for account in kept}
