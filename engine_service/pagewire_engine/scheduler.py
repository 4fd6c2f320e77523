"""Which tokens are computed in the next step.

Iteration-level scheduling (Orca, OSDI 2022) with chunked prefill (Sarathi-Serve, OSDI 2024): each
step has one budget of tokens, shared by the decodes of running sequences and by chunks of prompts.
"""

from __future__ import annotations

from pagewire_engine.adapters.turns import AdapterTurns
from pagewire_engine.block_space_manager import AllocStatus
from pagewire_engine.fair_share import Amount, TenantShares
from pagewire_engine.queues import RequestQueues
from pagewire_engine.request import Request, RequestStatus, Sequence
from pagewire_engine.schedule import Draft, Schedule, Share
from pagewire_engine.step import NewSequence, ScheduledSequence
from pagewire_engine.tenant_accounts import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

_SHARE_OF_ANOTHER = (
    "another tenant holds less than its share. This lengthens its answer time, and is rarer where "
    "more sequences run at a time (--max-num-seqs, --kv-cache-memory)."
)
_TURN_OF_ANOTHER = (
    "another adapter's requests wait for its place. This lengthens its answer time, and is rarer "
    "where a step may have more adapters (--max-loras)."
)
_NO_BLOCKS: list[int] = []  # shared, and never changed


class Scheduler:
    """Chooses what is computed, and who has to make room for it.

    Args:
        queues: the requests, and the blocks they hold.
    """

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._settings = queues.settings
        self._blocks = queues.blocks
        self._adapters = queues.adapters

    def schedule(self, step: int) -> Schedule:
        """Chooses the tokens of a step, and gives them their slots. While another step is under
        way, nobody is preempted: what has to be computed again is known only after it."""
        draft = Draft(self._settings.max_num_batched_tokens, self._count_decodes())
        if self._adapters is not None:
            self._change_places(draft, self._adapters, step)
        if not self._queues.swapped:
            self._admit_ahead(draft)
        self._schedule_running(draft)
        if not (draft.preempted or draft.lacks_blocks):
            self._swap_in(draft)
            if not self._queues.swapped:
                self._admit_waiting(draft)
        schedule = draft.finish(step, self._queues.forgotten)
        if not schedule.plan.is_empty:
            self._queues.note_forgotten_told()
        return schedule

    def _change_places(self, draft: Draft, turns: AdapterTurns, step: int) -> None:
        """Lets adapters take turns; those whose turn is over may have to make way."""
        waiting = self._queues.waiting.adapters()
        if not waiting:
            return
        running: dict[int, int] = {}
        recomputed: set[int] = set()
        for request in (*self._queues.swapped, *self._queues.running):
            priority = running.get(request.adapter, request.order[0])
            running[request.adapter] = min(priority, request.order[0])
            if request.is_recomputed:
                recomputed.add(request.adapter)
        leaving = turns.change_places(step, running, waiting, recomputed)
        if not leaving or any(request.adapter == leaving for request in self._queues.swapped):
            return
        victims = [request for request in self._queues.running if request.adapter == leaving]
        if victims and self._queues.num_under_way:
            draft.lacks_blocks = True
            return
        for victim in victims:
            self._queues.recompute(victim, _TURN_OF_ANOTHER)
            draft.preempted = True

    def _next_waiting(self) -> Request | None:
        """The waiting request that starts next; None where none may."""
        if self._adapters is None:
            return self._queues.waiting.head()
        return self._queues.waiting.head(self._adapters.may_start)

    def _count_decodes(self) -> int:
        num_decodes = 0
        for request in self._queues.running:
            if request.is_prefilling:
                # One that pools has nothing to decode, even when its prompt is on its way.
                request.is_prefilling = request.pooling is not None or not all(
                    s.is_decoding for s in request.live
                )
            if not request.is_prefilling:
                num_decodes += len(request.live)
        return num_decodes

    def _schedule_running(self, draft: Draft) -> None:
        """Decodes in their order, then prefills in that of the waiting queue: a tenant's long
        prompt takes turns with the prompts of others."""
        left = self._queues.running
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

    def _schedule_decode(self, decodes: Share, request: Request) -> bool:
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
        if told * self._settings.block_size <= start or not self._blocks.has_slot(sequence):
            return False
        decodes.budget -= 1
        decodes.sequences.append(sequence)
        decodes.entries.append(
            ScheduledSequence(sequence.sequence_id, start, 1, told, _NO_BLOCKS, sequence.itself)
        )
        request.account.service += OUTPUT_TOKEN_COST
        return True

    def _swap_in(self, draft: Draft) -> None:
        """Lets swapped requests go on. Not in a step that preempts: what comes in would go out."""
        while self._queues.swapped:
            request = self._queues.swapped[0]
            num_seqs = len(request.live)
            if draft.prefills.budget == 0:
                return
            if self._num_running_seqs() + request.most_sequences > self._settings.max_num_seqs:
                return
            status = self._blocks.can_swap_in(request, pool_is_idle=not self._queues.running)
            if status is AllocStatus.LATER:
                return
            if status is AllocStatus.NEVER:
                if self._queues.num_under_way:
                    draft.lacks_blocks = True
                    return
                self._queues.recompute(request)
                continue
            self._queues.swap_in(draft, request)
            if not request.is_prefilling:
                # The rest of them wait for a later step, where one has not the tokens for all.
                taken = min(num_seqs, draft.prefills.budget)
                draft.prefills.budget -= taken
                draft.decodes.budget += taken
            self._schedule_request(draft, request)

    def _num_running_seqs(self) -> int:
        return sum(request.most_sequences for request in self._queues.running)

    def _admit_ahead(self, draft: Draft) -> None:
        """Lets requests start, before what runs is scheduled, of tenants that hold less than their
        share: in the place of other tenants' requests, or only before their prefills."""
        while draft.prefills.budget > 0 and (request := self._next_waiting()) is not None:
            if all(each.tenant == request.tenant for each in self._queues.running):
                return
            num_seqs = self._num_running_seqs()
            status = self._can_start(request, num_seqs)
            if status is AllocStatus.LATER:
                victims = self._places_for(request, draft, num_seqs)
                if not victims:
                    return
                if self._queues.num_under_way:
                    draft.lacks_blocks = True
                    return
                for victim in victims:
                    self._queues.recompute(victim, _SHARE_OF_ANOTHER)
                    draft.preempted = True
                status = self._can_start(request, self._num_running_seqs())
            elif not self._overtakes(request):
                return
            if status is not AllocStatus.OK:
                return
            self._start(draft, request)

    def _overtakes(self, request: Request) -> bool:
        prefills = [each.fair_order for each in self._queues.running if each.is_prefilling]
        return bool(prefills) and request.fair_order < min(prefills)

    def _places_for(self, request: Request, draft: Draft, num_seqs: int) -> list[Request]:
        """Running requests of other tenants in whose place a waiting one may start, while so many
        sequences run."""
        blocks = self._blocks
        return self._tenant_shares().places_for(
            request,
            Amount(self._settings.max_num_seqs - num_seqs, blocks.num_available_blocks),
            draft.requests(),
            wanted=Amount(request.most_sequences, blocks.num_wanted(request)),
            freed_by=lambda each: Amount(each.most_sequences, blocks.num_alone(each)),
        )

    def _tenant_shares(self) -> TenantShares:
        settings = self._settings
        total = Amount(settings.max_num_seqs, settings.num_blocks)
        return TenantShares(self._queues.running, total, settings.block_size)

    def _admit_waiting(self, draft: Draft) -> None:
        if not self._queues.waiting:
            return
        num_seqs = self._num_running_seqs()
        while draft.prefills.budget > 0 and (request := self._next_waiting()) is not None:
            status = self._can_start(request, num_seqs)
            if status is AllocStatus.LATER:
                return
            if status is AllocStatus.NEVER:
                self._queues.fail_for_blocks(draft, request)
                continue
            self._start(draft, request)
            num_seqs += request.most_sequences

    def _can_start(self, request: Request, num_seqs: int) -> AllocStatus:
        if num_seqs + request.most_sequences > self._settings.max_num_seqs:
            return AllocStatus.LATER
        return self._blocks.can_allocate(request, pool_is_idle=not self._queues.running)

    def _start(self, draft: Draft, request: Request) -> None:
        """Lets an admitted request run, with its first chunk of prefill."""
        num_cached_tokens = self._queues.start(request)
        if request.clock.first_scheduled is None:
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        for sequence in request.live:
            draft.new_sequences.append(_introduced(sequence))
        self._schedule_request(draft, request)

    def _schedule_request(self, draft: Draft, request: Request) -> None:
        """Schedules what can be computed of a running request. Where blocks lack others are
        preempted, or the request itself is and has no part in the step."""
        share = draft.prefills if request.is_prefilling else draft.decodes
        sequences: list[Sequence] = []
        entries: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        for sequence in (request.leader,) if request.leader_alone else request.live:
            num_due = _num_due(request, sequence)
            if num_due == 0:
                continue
            if num_due > share.budget and not self._settings.chunks_prompts:
                break
            num_tokens = min(num_due, share.budget)
            if num_tokens == 0:
                break
            copied = self._append_slots(draft, sequence, num_tokens, copies)
            if request.status is not RequestStatus.RUNNING:
                return
            if copied is None:
                break
            if copied:
                copies.extend(copied)
                index = sequence.num_computed_tokens // self._settings.block_size
                sequence.num_blocks_told = min(sequence.num_blocks_told, index)
            share.budget -= num_tokens
            sequences.append(sequence)
            entries.append(self._entry(sequence, num_tokens, samples=num_tokens == num_due))
        share.sequences.extend(sequences)
        share.entries.extend(entries)
        if request.beam_search is not None:
            self._tell_beams(draft, sequences)
        if copies:
            draft.block_copies[request.request_id] = copies

    def _append_slots(
        self,
        draft: Draft,
        sequence: Sequence,
        num_tokens: int,
        copies: list[tuple[int, int]],
    ) -> tuple[tuple[int, int], ...] | None:
        """Slots for a sequence's next tokens, in the blocks of others if there are no more.

        Args:
            copies: copy-on-write that its request waits for already.

        Returns:
            The blocks to copy first. None: there are no slots, since nobody may be preempted now,
            or since its own request was the one to give way.
        """
        while (copied := self._blocks.append_slots(sequence, num_tokens)) is None:
            if self._queues.num_under_way:
                draft.lacks_blocks = True
                return None
            if self._make_room(draft, copies) is sequence.request:
                return None
        return copied

    def _tell_beams(self, draft: Draft, beams: list[Sequence]) -> None:
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
        sequence.num_blocks_told = self._blocks.blocks_for(start + num_tokens)
        new_blocks = self._blocks.block_table(sequence)[told : sequence.num_blocks_told]
        request = sequence.request
        sample_for = request.sampled_with(sequence) if samples else ()
        request.account.service += OUTPUT_TOKEN_COST * len(sample_for)
        if request.is_prefilling:
            num_new = start + num_tokens - max(start, sequence.num_paid_tokens)
            request.account.service += PROMPT_TOKEN_COST * max(0, num_new)
        return ScheduledSequence(
            sequence.sequence_id, start, num_tokens, told, new_blocks, sample_for
        )

    def _make_room(self, draft: Draft, copies: list[tuple[int, int]]) -> Request:
        """Takes the blocks of a running request that the step has no part for yet: of the least
        urgent priority, the latest of the tenant that holds most. It is preempted, or fails when
        it had the pool for itself. Returns it.

        Args:
            copies: copy-on-write that the request being scheduled waits for; if it is the victim,
                they are not going to happen.
        """
        scheduled = draft.requests()
        victim = self._tenant_shares().first_to_yield(
            request for request in self._queues.running if request not in scheduled
        )
        if len(self._queues.running) == 1 and not self._queues.swapped:
            self._queues.fail_for_blocks(draft, victim)
            return victim
        draft.preempted = True
        if self._queues.is_swappable(victim) and self._blocks.can_swap_out(victim):
            self._queues.swap_out(draft, victim, copies)
        else:
            self._queues.recompute(victim)
        return victim


def _num_due(request: Request, sequence: Sequence) -> int:
    """Tokens of a sequence that are still to be computed, before its next token or the others'
    first can be chosen. 0 where a step under way brings its prompt or its last token to an end,
    and of a beam that waits for the others to come to choose."""
    if sequence.num_tokens >= request.max_num_tokens:
        return 0
    end = request.num_prompt_tokens if request.leader_alone else sequence.num_tokens
    return end - sequence.num_computed_tokens


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
        pooling=request.pooling,
        adapter=request.adapter,
    )


def _fair_order(request: Request) -> tuple[int, int, int]:
    return request.fair_order
