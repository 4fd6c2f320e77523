"""Who gives way when not all can run: fairness among those that have started.

To choose who starts next (see `waiting_queue`) is not enough where one tenant's long answers hold
every place: whoever comes then waits until one of them ends. So a tenant's part of what runs is
measured, as its dominant share ("Dominant Resource Fairness", Ghodsi et al., NSDI 2011): the larger
of its parts of the sequences and of the blocks. Whoever has the largest gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pagewire_engine.request import Request


class Amount(NamedTuple):  # hundreds a step: a frozen dataclass would take three times as long
    """Sequences and blocks: what there is, what is free, or what someone holds."""

    num_seqs: int
    num_blocks: int

    def plus(self, other: Amount) -> Amount:
        return Amount(self.num_seqs + other.num_seqs, self.num_blocks + other.num_blocks)

    def less(self, other: Amount) -> Amount:
        return Amount(self.num_seqs - other.num_seqs, self.num_blocks - other.num_blocks)

    def covers(self, other: Amount) -> bool:
        return self.num_seqs >= other.num_seqs and self.num_blocks >= other.num_blocks

    def share_of(self, total: Amount) -> float:
        """The dominant share."""
        return max(self.num_seqs / total.num_seqs, self.num_blocks / total.num_blocks)


NOTHING = Amount(0, 0)


def amount_of(request: Request, block_size: int) -> Amount:
    """What a request holds while it runs; the prompt counts once."""
    num_tokens = request.num_prompt_tokens
    for sequence in request.live:
        num_tokens += len(sequence.output_token_ids)
    return Amount(request.most_sequences, -(-num_tokens // block_size))


class TenantShares:
    """What each tenant holds of what runs.

    Args:
        running: requests, in order of priority and arrival.
        total: what can be held at a time.
        block_size: tokens in a block.
    """

    def __init__(self, running: Sequence[Request], total: Amount, block_size: int) -> None:
        self._running = running
        self._total = total
        self._block_size = block_size
        self._amounts: dict[Request, Amount] = {}
        self._held: dict[str, Amount] = {}
        for request in running:
            amount = self._amounts[request] = amount_of(request, block_size)
            held = self._held.get(request.tenant)
            self._held[request.tenant] = amount if held is None else held.plus(amount)

    def first_to_yield(self, candidates: Iterable[Request]) -> Request:
        """Which of some running requests is preempted for want of blocks: of the least urgent
        priority, the latest of the tenant that holds most."""
        return max(
            candidates,
            key=lambda each: (
                each.order[0],
                self._of(each.tenant).share_of(self._total),
                each.order[1],
            ),
        )

    def places_for(
        self,
        request: Request,
        free: Amount,
        staying: Collection[Request],
        *,
        wanted: Amount | None = None,
        freed_by: Callable[[Request], Amount] | None = None,
    ) -> list[Request]:
        """Running requests of other tenants that are to make room for a waiting one.

        Only who keeps at least as much as the newcomer's tenant then has gives something away, so
        that nobody can take it back at once; never for one that is less urgent. The latest go
        first, for they have the least to compute again.

        Args:
            request: waits, and does not fit.
            free: what nobody holds.
            staying: running requests that can't be preempted now.
            wanted: what it takes to start; default: what it comes to hold, as if nothing of it
                were there.
            freed_by: what comes free when a request goes; default: what it holds, as if it held
                that alone.

        Returns:
            In the order of their going; none where that would not make room enough.
        """
        comes_to_hold = amount_of(request, self._block_size)
        wanted = wanted or comes_to_hold
        freed_by = freed_by or self._amounts.__getitem__
        bound = self._of(request.tenant).plus(comes_to_hold).share_of(self._total)
        # Of the others, those that hold so much as to have something to give away: mostly none.
        held = {
            tenant: amount
            for tenant, amount in self._held.items()
            if tenant != request.tenant and amount.share_of(self._total) >= bound
        }
        leaving: list[Request] = []
        if not held:
            return leaving
        for candidate in reversed(self._running):
            if free.covers(wanted) or candidate.order[0] < request.order[0]:
                break
            if candidate.tenant not in held or candidate in staying:
                continue
            rest = held[candidate.tenant].less(self._amounts[candidate])
            if rest.share_of(self._total) >= bound:
                held[candidate.tenant] = rest
                free = free.plus(freed_by(candidate))
                leaving.append(candidate)
        return leaving if free.covers(wanted) else []

    def _of(self, tenant: str) -> Amount:
        return self._held.get(tenant, NOTHING)
