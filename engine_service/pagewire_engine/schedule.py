"""A step before it is computed: put together as a Draft, then a Schedule. Plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from pagewire.errors import PagewireError
from pagewire_engine.request import Request, Sequence
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step is to do.

    Attributes:
        plan: for the executor, unless it is empty.
        sequences: one for each entry of `plan.scheduled`.
        num_decodes: how many of those entries, from the first on, are decodes.
        block_copies: the plan's copies, by the id of the request they are for.
        failures: requests that can't go on, out of all queues already, and why.
        lacks_blocks: some that run were left out, since nobody can be preempted while a step is
            under way: the next schedule should wait for its results.
    """

    plan: StepPlan
    sequences: list[Sequence]
    num_decodes: int
    block_copies: dict[str, list[tuple[int, int]]]
    failures: list[tuple[Request, PagewireError]]
    lacks_blocks: bool = False

    def without_ended(self) -> Schedule:
        """What is left of it when some of its requests have ended meanwhile. Where only a sequence
        has, what it computes may be another's: the prompt that they share."""
        kept = [n for n, sequence in enumerate(self.sequences) if sequence.request.live]
        return replace(
            self,
            plan=replace(self.plan, scheduled=[self.plan.scheduled[n] for n in kept]),
            sequences=[self.sequences[n] for n in kept],
            num_decodes=sum(n < self.num_decodes for n in kept),
        )

    @property
    def prefills(self) -> list[Sequence]:
        """The sequences whose entries are prefill."""
        return self.sequences[self.num_decodes :]

    def requests(self) -> list[Request]:
        """Those that it computes something of, each once."""
        return list(dict.fromkeys(sequence.request for sequence in self.sequences))

    def plan_of(self, requests: Collection[Request]) -> StepPlan:
        """The plan once more for some of the requests, for a worker that has seen the whole."""
        parts = zip(self.sequences, self.plan.scheduled, strict=True)
        copies = [self.block_copies.get(request.request_id, []) for request in requests]
        return StepPlan(
            step=self.plan.step,
            scheduled=[entry for sequence, entry in parts if sequence.request in requests],
            block_copies=[copy for group in copies for copy in group],
        )


class Share:
    """The decodes' or the prefills' share of a step while it is put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.entries: list[ScheduledSequence] = []


class Draft:
    """A step while it is put together."""

    def __init__(self, budget: int, num_decodes: int) -> None:
        # Every decode gets its token before a prefill chunk gets what they leave, or else a long
        # prompt would hold up all who are being answered.
        self.decodes = Share(min(num_decodes, budget))
        self.prefills = Share(budget - self.decodes.budget)
        self.new_sequences: list[NewSequence] = []
        self.appended: list[tuple[int, int]] = []
        self.block_copies: dict[str, list[tuple[int, int]]] = {}
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.preempted = False
        self.lacks_blocks = False
        self.failures: list[tuple[Request, PagewireError]] = []

    def requests(self) -> set[Request]:
        """Those that have a part in the step: they can't be preempted any more."""
        return {s.request for s in self.decodes.sequences + self.prefills.sequences}

    def finish(self, step: int, forgotten: list[int]) -> Schedule:
        """The step as it stands.

        Args:
            step: its number.
            forgotten: for the plan, unless that is empty.
        """
        plan = StepPlan(step)
        scheduled = self.decodes.entries + self.prefills.entries
        if scheduled or self.swap_out or self.swap_in:
            plan = StepPlan(
                step=step,
                new_sequences=self.new_sequences,
                scheduled=scheduled,
                forgotten=forgotten,
                block_copies=[copy for group in self.block_copies.values() for copy in group],
                swap_out=self.swap_out,
                swap_in=self.swap_in,
                appended=self.appended,
            )
        return Schedule(
            plan=plan,
            sequences=self.decodes.sequences + self.prefills.sequences,
            num_decodes=len(self.decodes.entries),
            block_copies=self.block_copies,
            failures=self.failures,
            lacks_blocks=self.lacks_blocks,
        )
