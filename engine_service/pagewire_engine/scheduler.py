"""Which tokens are computed in the next step.

Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024): each
step has one budget of tokens, shared by the decodes of running sequences and by chunks of prompts.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Literal

from pagewire.errors import InvalidArgumentError, PagewireError, ResourceExhaustedError
from pagewire_engine.block_space_manager import AllocStatus, BlockSpaceManager
from pagewire_engine.fair_share import Amount, TenantShares
from pagewire_engine.request import BeamChange, Request, RequestStatus, Sequence
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.tenant_accounts import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from pagewire_engine.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

_NO_BLOCKS: list[int] = []  # shared, and never changed
_HAS_BLOCKS = (RequestStatus.RUNNING, RequestStatus.SWAPPED)

# A preemption is worth a line; a storm of them is not worth a line each.
_PREEMPTIONS_PER_WARNING = 50
_TOO_FEW_BLOCKS = (
    "there are not enough free KV blocks for all running requests. This lengthens its answer time. "
    "Give the KV cache more memory (--kv-cache-memory, --gpu-memory-utilization) or run fewer "
    "sequences at a time (--max-num-seqs)."
)
_SHARE_OF_ANOTHER = (
    "another tenant holds less than its share. This lengthens its answer time, and is rarer where "
    "more sequences run at a time (--max-num-seqs, --kv-cache-memory)."
)
# How far a tenant that was idle may be behind the others: so many full steps.
_BURST_STEPS = 2


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits the scheduler keeps.

    Attributes:
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens computed in one step.
        max_model_len: longest sequence, prompt and output together.
        block_size: tokens in a KV block.
        num_blocks: blocks in the pool.
        num_cpu_blocks: KV blocks of host memory, to swap to.
        preemption_mode: what becomes of a preempted request's blocks. "recompute": they are
            dropped; "swap": moved to host memory, where there is room; "auto": moved where the
            request's sequences share them, else dropped.
        enable_prefix_caching: whether blocks are found by their content.
        max_waiting_requests: requests that may wait; more are turned away.
        max_queue_time_s: seconds after which a request that has not started fails; None: never.
        watermark: fraction of the pool that admission leaves free.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_cpu_blocks: int = 0
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    enable_prefix_caching: bool = True
    max_waiting_requests: int = 4096
    max_queue_time_s: float | None = None
    watermark: float = 0.01


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
        """What is left of it when some of its sequences have ended meanwhile."""
        kept = [n for n, sequence in enumerate(self.sequences) if sequence.finish_reason is None]
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

    def split(self) -> list[tuple[Request, StepPlan]]:
        """The plan once more, request by request, for a worker that has seen the whole of it."""
        entries: dict[Request, list[ScheduledSequence]] = {}
        for sequence, entry in zip(self.sequences, self.plan.scheduled, strict=True):
            entries.setdefault(sequence.request, []).append(entry)
        return [
            (
                request,
                StepPlan(
                    step=self.plan.step,
                    scheduled=scheduled,
                    block_copies=self.block_copies.get(request.request_id, []),
                ),
            )
            for request, scheduled in entries.items()
        ]


class _Share:
    """The decodes' or the prefills' share of a step while it is put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.entries: list[ScheduledSequence] = []


class _Draft:
    """A step while it is put together."""

    def __init__(self, budget: int, num_decodes: int) -> None:
        # Every decode gets its token before a prefill chunk gets what they leave, or else a long
        # prompt would hold up all who are being answered.
        self.decodes = _Share(min(num_decodes, budget))
        self.prefills = _Share(budget - self.decodes.budget)
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


class Scheduler:
    """Three queues, each in order of priority, then arrival.

    Attributes:
        waiting: requests without blocks: new ones, and preempted ones to be recomputed.
        running: requests with blocks.
        swapped: requests whose blocks are in host memory; while there is one, no prompt starts.
        blocks: the pool.
        num_preemptions: since the engine's start, by recompute and by swap.
        num_swaps: those of them by swap.
        num_block_copies: blocks copied on a write, since the engine's start.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.blocks = BlockSpaceManager(
            settings.num_blocks,
            settings.block_size,
            settings.watermark,
            num_cpu_blocks=settings.num_cpu_blocks,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        self.waiting = WaitingQueue(burst=_BURST_STEPS * settings.max_num_batched_tokens)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_block_copies = 0
        # Ids of sequences that the worker knows and need not know any longer.
        self._forgotten: list[int] = []
        # Steps under way, and sequences that ended meanwhile: after which step their blocks, and
        # whether those are to be discarded.
        self._num_under_way = 0
        self._last_launched = 0
        self._unfreed: list[tuple[int, Sequence, bool]] = []

    # -- entering and leaving ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Puts a request into `waiting`.

        Raises:
            InvalidArgumentError: it could never run here.
        """
        settings = self.settings
        if request.num_prompt_tokens >= settings.max_model_len:
            raise InvalidArgumentError(
                "prompt_token_ids",
                f"the prompt has {request.num_prompt_tokens} tokens; with at least one token of "
                f"output it must fit in the context of {settings.max_model_len}",
            )
        if request.most_sequences > settings.max_num_seqs:
            raise InvalidArgumentError(
                "n" if request.beam_search is None else "beam_width",
                f"{request.most_sequences} sequences are more than the engine runs at a time "
                f"(max_num_seqs={settings.max_num_seqs})",
            )
        if self.blocks.can_allocate(request, pool_is_idle=True) is AllocStatus.NEVER:
            raise InvalidArgumentError("prompt_token_ids", _pool_too_small("the request", settings))
        self.waiting.add(request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """Takes a sequence that ended out of its request, and its blocks back; with the last one
        goes the request."""
        request = sequence.request
        leads = not request.prompt_shared and sequence is request.leader
        request.live.remove(sequence)
        if request.status in _HAS_BLOCKS:
            if leads and request.live:
                # The prompt computed so far is the next leader's too.
                self.blocks.fork(sequence, request.leader)
                request.leader.num_computed_tokens = sequence.num_computed_tokens
            self._forgotten.append(sequence.sequence_id)
        self._free(sequence)
        if not request.live:
            self._leave_queue(request)

    def remove(self, request: Request, *, discard: bool = False) -> None:
        """Takes a request out of its queue, and its blocks back.

        Args:
            discard: it failed, and its blocks' content is not to be trusted.
        """
        if request.status in _HAS_BLOCKS:
            self._forgotten.extend(
                sequence.sequence_id
                for sequence in request.live
                if sequence.num_output_told is not None
            )
        for sequence in request.sequences:
            self._free(sequence, discard=discard)
        self._leave_queue(request)

    def _leave_queue(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status in _HAS_BLOCKS:
            queue = self.running if request.status is RequestStatus.RUNNING else self.swapped
            del queue[bisect_left(queue, request.order, key=_order)]
        request.status = RequestStatus.FINISHED

    def _free(self, sequence: Sequence, *, discard: bool = False) -> None:
        """Takes a sequence's blocks back, as soon as no step under way names them."""
        if self._num_under_way:
            sequence.publish_at = sys.maxsize
            self._unfreed.append((self._last_launched, sequence, discard))
        else:
            self.blocks.free_sequence(sequence, discard=discard)

    # -- the step ----------------------------------------------------------------------------

    def launched(self, step: int) -> None:
        """The step is under way: what is scheduled from now on comes after it."""
        self._num_under_way += 1
        self._last_launched = step

    def landed(self, step: int) -> None:
        """The step is no longer under way, and its results are booked."""
        self._num_under_way -= 1
        while self._unfreed and self._unfreed[0][0] <= step:
            _, sequence, discard = self._unfreed.pop(0)
            self.blocks.free_sequence(sequence, discard=discard)

    def schedule(self, step: int) -> Schedule:
        """Chooses the tokens of a step, and gives them their slots. While another step is under
        way, nobody is preempted: what has to be computed again is known only after it."""
        draft = _Draft(self.settings.max_num_batched_tokens, self._count_decodes())
        if not self.swapped:
            self._admit_ahead(draft)
        self._schedule_running(draft)
        if not (draft.preempted or draft.lacks_blocks):
            self._swap_in(draft)
            if not self.swapped:
                self._admit_waiting(draft)
        return self._finish(draft, step)

    def share_prompt(self, request: Request) -> None:
        """Once the leader has computed the prompt, gives the others a share in its blocks."""
        if not request.leader_alone:
            return
        leader = request.leader
        if leader.num_computed_tokens < request.num_prompt_tokens:
            return
        for sequence in request.live:
            if sequence is not leader:
                self.blocks.fork(leader, sequence)
                sequence.num_computed_tokens = leader.num_computed_tokens
        request.prompt_shared = True

    def change_beams(self, request: Request, change: BeamChange) -> None:
        """Lets forked beams share their parents' blocks, and takes back those of dropped ones."""
        for parent, child in change.forks:
            self.blocks.fork(parent, child)
        for beam in change.dropped:
            self._forgotten.append(beam.sequence_id)
            self._free(beam)
        request.prompt_shared = True

    def _count_decodes(self) -> int:
        num_decodes = 0
        for request in self.running:
            if request.is_prefilling:
                request.is_prefilling = not all(s.is_decoding for s in request.live)
            if not request.is_prefilling:
                num_decodes += len(request.live)
        return num_decodes

    def _schedule_running(self, draft: _Draft) -> None:
        """Decodes in their order, then prefills in that of the waiting queue: a tenant's long
        prompt takes turns with the prompts of others."""
        left = self.running
        if scheduled := draft.requests():
            left = [request for request in left if request not in scheduled]
        decodes = [request for request in left if not request.is_prefilling]
        prefills = [request for request in left if request.is_prefilling]
        prefills.sort(key=_fair_order)
        for request in decodes + prefills:
            # Those before it may have taken its blocks.
            if request.status is not RequestStatus.RUNNING:
                continue
            if not self._schedule_decode(draft.decodes, request):
                self._schedule_request(draft, request)

    def _schedule_decode(self, decodes: _Share, request: Request) -> bool:
        """The common case, in few words: the next token of a single sequence, into a block that it
        has already. Returns whether it was that."""
        if request.is_prefilling or len(request.live) != 1 or decodes.budget == 0:
            return False
        if request.beam_search is not None:
            return False
        sequence = request.live[0]
        start, told = sequence.num_computed_tokens, sequence.num_blocks_told
        if not start == sequence.num_tokens - 1 < request.max_num_tokens - 1:
            return False
        if told * self.settings.block_size <= start or not self.blocks.has_slot(sequence):
            return False
        decodes.budget -= 1
        decodes.sequences.append(sequence)
        decodes.entries.append(
            ScheduledSequence(sequence.sequence_id, start, 1, told, _NO_BLOCKS, sequence.itself)
        )
        request.account.service += OUTPUT_TOKEN_COST
        return True

    def _swap_in(self, draft: _Draft) -> None:
        """Lets swapped requests go on. Not in a step that preempts: what comes in would go out."""
        while self.swapped:
            request = self.swapped[0]
            num_seqs = len(request.live)
            if draft.prefills.budget == 0:
                return
            if self._num_running_seqs() + request.most_sequences > self.settings.max_num_seqs:
                return
            status = self.blocks.can_swap_in(request, pool_is_idle=not self.running)
            if status is AllocStatus.LATER:
                return
            if status is AllocStatus.NEVER:
                if self._num_under_way:
                    draft.lacks_blocks = True
                    return
                self._recompute(request)
                continue
            del self.swapped[0]
            draft.swap_in.extend(self.blocks.swap_in(request))
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_order)
            for sequence in request.live:
                sequence.num_blocks_told = 0
            if not request.is_prefilling:
                # The rest of them wait for a later step, where one has not the tokens for all.
                taken = min(num_seqs, draft.prefills.budget)
                draft.prefills.budget -= taken
                draft.decodes.budget += taken
            self._schedule_request(draft, request)

    def _num_running_seqs(self) -> int:
        return sum(request.most_sequences for request in self.running)

    def _admit_ahead(self, draft: _Draft) -> None:
        """Lets requests start, before what runs is scheduled, of tenants that hold less than their
        share: in the place of other tenants' requests, or only before their prefills."""
        while draft.prefills.budget > 0 and (request := self.waiting.head()) is not None:
            if all(each.tenant == request.tenant for each in self.running):
                return
            status = self._can_start(request, self._num_running_seqs())
            if status is AllocStatus.LATER:
                victims = self._places_for(request, draft)
                if victims and self._num_under_way:
                    draft.lacks_blocks = True
                    return
                for victim in victims:
                    self._recompute(victim, _SHARE_OF_ANOTHER)
                    draft.preempted = True
                status = self._can_start(request, self._num_running_seqs())
            elif not self._overtakes(request):
                return
            if status is not AllocStatus.OK:
                return
            self.waiting.remove(request)
            self._start(draft, request)

    def _overtakes(self, request: Request) -> bool:
        prefills = [each.fair_order for each in self.running if each.is_prefilling]
        return bool(prefills) and request.fair_order < min(prefills)

    def _places_for(self, request: Request, draft: _Draft) -> list[Request]:
        """Running requests of other tenants in whose place a waiting one may start."""
        shares = self._tenant_shares()
        blocks, settings = self.blocks, self.settings
        watermark = int(settings.watermark * settings.num_blocks)
        free = Amount(
            settings.max_num_seqs - self._num_running_seqs(),
            blocks.num_available_blocks - watermark,
        )
        return shares.places_for(request, free, draft.requests())

    def _tenant_shares(self) -> TenantShares:
        settings = self.settings
        total = Amount(settings.max_num_seqs, settings.num_blocks)
        return TenantShares(self.running, total, settings.block_size)

    def _admit_waiting(self, draft: _Draft) -> None:
        if not self.waiting:
            return
        num_seqs = self._num_running_seqs()
        while draft.prefills.budget > 0 and (request := self.waiting.head()) is not None:
            status = self._can_start(request, num_seqs)
            if status is AllocStatus.LATER:
                return
            if status is AllocStatus.NEVER:
                self._fail_for_blocks(draft, request)
                continue
            self.waiting.remove(request)
            self._start(draft, request)
            num_seqs += request.most_sequences

    def _can_start(self, request: Request, num_seqs: int) -> AllocStatus:
        if num_seqs + request.most_sequences > self.settings.max_num_seqs:
            return AllocStatus.LATER
        return self.blocks.can_allocate(request, pool_is_idle=not self.running)

    def _start(self, draft: _Draft, request: Request) -> None:
        """Moves an admitted request to `running`, with its first chunk of prefill."""
        num_cached_tokens = self.blocks.allocate(request)
        if request.clock.first_scheduled is None:
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)
        for sequence in request.live:
            draft.new_sequences.append(_introduced(sequence))
        self._schedule_request(draft, request)

    def _schedule_request(self, draft: _Draft, request: Request) -> bool:
        """Schedules what can be computed of a running request, preempting others where
        blocks lack. Returns whether the request is still running."""
        share = draft.prefills if request.is_prefilling else draft.decodes
        alone = request.leader_alone
        sequences: list[Sequence] = []
        entries: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        for sequence in (request.leader,) if alone else request.live:
            end = request.num_prompt_tokens if alone else sequence.num_tokens
            num_tokens = end - sequence.num_computed_tokens
            if num_tokens == 0 or sequence.num_tokens >= request.max_num_tokens:
                # A step under way brings its prompt or its last token to an end, or it is a beam
                # that waits for the others to come to choose.
                continue
            samples = num_tokens <= share.budget
            if not samples:
                num_tokens = share.budget
                if num_tokens == 0:
                    break
            while (copied := self.blocks.append_slots(sequence, num_tokens)) is None:
                if self._num_under_way:
                    draft.lacks_blocks = True
                    break
                if self._make_room(draft, copies) is request:
                    return False
            if copied is None:
                break
            if copied:
                copies.extend(copied)
                index = sequence.num_computed_tokens // self.settings.block_size
                sequence.num_blocks_told = min(sequence.num_blocks_told, index)
            share.budget -= num_tokens
            sequences.append(sequence)
            entries.append(self._entry(sequence, num_tokens, samples))
        share.sequences.extend(sequences)
        share.entries.extend(entries)
        if request.beam_search is not None:
            self._tell_beams(draft, sequences)
        if copies:
            draft.block_copies[request.request_id] = copies
            self.num_block_copies += len(copies)
        return True

    def _tell_beams(self, draft: _Draft, beams: list[Sequence]) -> None:
        """Tells the worker of forked beams and chosen tokens that it does not know of."""
        for beam in beams:
            if beam.num_output_told is None:
                draft.new_sequences.append(_introduced(beam))
            elif beam.num_output_told < len(beam.output_token_ids):
                draft.appended.append((beam.sequence_id, beam.output_token_ids[-1]))
                beam.num_output_told += 1

    def _entry(self, sequence: Sequence, num_tokens: int, samples: bool) -> ScheduledSequence:
        """The sequence's part of the plan, with the end of its block table that is news. Its tenant
        is charged for it here."""
        start, told = sequence.num_computed_tokens, sequence.num_blocks_told
        sequence.num_blocks_told = self.blocks.blocks_for(start + num_tokens)
        new_blocks = self.blocks.block_table(sequence)[told : sequence.num_blocks_told]
        request = sequence.request
        sample_for = request.sampled_with(sequence) if samples else ()
        request.account.service += OUTPUT_TOKEN_COST * len(sample_for)
        if request.is_prefilling:
            num_new = start + num_tokens - max(start, sequence.num_paid_tokens)
            request.account.service += PROMPT_TOKEN_COST * max(0, num_new)
        return ScheduledSequence(
            sequence.sequence_id, start, num_tokens, told, new_blocks, sample_for
        )

    def _finish(self, draft: _Draft, step: int) -> Schedule:
        plan = StepPlan(step)
        scheduled = draft.decodes.entries + draft.prefills.entries
        if scheduled or draft.swap_out:
            plan = StepPlan(
                step=step,
                new_sequences=draft.new_sequences,
                scheduled=scheduled,
                forgotten=self._forgotten,
                block_copies=[copy for group in draft.block_copies.values() for copy in group],
                swap_out=draft.swap_out,
                swap_in=draft.swap_in,
                appended=draft.appended,
            )
            self._forgotten = []
        return Schedule(
            plan=plan,
            sequences=draft.decodes.sequences + draft.prefills.sequences,
            num_decodes=len(draft.decodes.entries),
            block_copies=draft.block_copies,
            failures=draft.failures,
            lacks_blocks=draft.lacks_blocks,
        )

    # -- preemption --------------------------------------------------------------------------

    def _make_room(self, draft: _Draft, copies: list[tuple[int, int]]) -> Request:
        """Takes the blocks of a running request that the step has no part for yet: of the least
        urgent priority, the latest of the tenant that holds most. It is preempted, or fails when
        it had the pool for itself. Returns it.

        Args:
            copies: copy-on-write that the request being scheduled waits for; if it is the victim,
                they are not going to happen.
        """
        scheduled = draft.requests()
        victim = self._tenant_shares().first_to_yield(
            request for request in self.running if request not in scheduled
        )
        if len(self.running) == 1 and not self.swapped:
            self._fail_for_blocks(draft, victim)
            return victim
        draft.preempted = True
        if self._is_swappable(victim) and self.blocks.can_swap_out(victim):
            self._swap_out(draft, victim, copies)
        else:
            self._recompute(victim)
        return victim

    def _is_swappable(self, request: Request) -> bool:
        mode = self.settings.preemption_mode
        shares = request.prompt_shared and len(request.live) > 1
        return mode == "swap" or (mode == "auto" and shares)

    def _swap_out(self, draft: _Draft, request: Request, copies: list[tuple[int, int]]) -> None:
        """Moves a running request's blocks to host memory."""
        unwritten = {destination: source for source, destination in copies}
        draft.swap_out.extend(self.blocks.swap_out(request, unwritten))
        self._leave_queue(request)
        request.status = RequestStatus.SWAPPED
        insort(self.swapped, request, key=_order)
        self.num_swaps += 1
        self._count_preemption(request, "swap", _TOO_FEW_BLOCKS)

    def _recompute(self, request: Request, cause: str = _TOO_FEW_BLOCKS) -> None:
        """Drops a request's blocks; its tokens will be computed again."""
        was_swapped = request.status is RequestStatus.SWAPPED
        self.remove(request)
        for sequence in request.live:
            # What it has produced was paid for as output.
            paid = sequence.num_tokens if sequence.is_decoding else sequence.num_computed_tokens
            sequence.num_paid_tokens = max(sequence.num_paid_tokens, paid)
            sequence.num_computed_tokens = 0
            sequence.num_blocks_told = 0
            sequence.num_output_told = None
        request.candidates.clear()
        request.is_prefilling = True
        request.prompt_shared = False
        request.status = RequestStatus.WAITING
        self.waiting.add(request)
        if not was_swapped:
            self._count_preemption(request, "recompute", cause)

    def _count_preemption(self, request: Request, how: str, cause: str) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        if self.num_preemptions % _PREEMPTIONS_PER_WARNING == 1:
            logger.warning(
                "Request %s is preempted by %s because %s Preemptions since start: %d.",
                request.request_id,
                how,
                cause,
                self.num_preemptions,
            )

    def _fail_for_blocks(self, draft: _Draft, request: Request) -> None:
        self.remove(request)
        message = _pool_too_small("the request with what it has produced", self.settings)
        draft.failures.append((request, ResourceExhaustedError(message)))


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _introduced(sequence: Sequence) -> NewSequence:
    """All that the worker is to know of a sequence, blocks apart."""
    request = sequence.request
    sequence.num_output_told = len(sequence.output_token_ids)
    return NewSequence(
        sequence_id=sequence.sequence_id,
        sequence_index=sequence.index,
        seed=request.seed,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(sequence.output_token_ids),
        sampling_params=request.sampling_params,
    )


def _fair_order(request: Request) -> tuple[int, int, int]:
    return request.fair_order


def _pool_too_small(what: str, settings: SchedulerSettings) -> str:
    return (
        f"{what} does not fit in the KV cache of {settings.num_blocks} blocks of "
        f"{settings.block_size} tokens even alone; give the engine more KV cache memory "
        "(--kv-cache-memory), or ask for fewer tokens or sequences"
    )
