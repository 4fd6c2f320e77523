"""Which requests there are, in which queue each one is, and which blocks it holds.

Here a request enters and leaves, and moves between the queues: preempted by swap or by recompute,
or ended in the midst of a step. What a step computes is the scheduler's business.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Literal

from pagewire.errors import InvalidArgumentError, ResourceExhaustedError
from pagewire_engine.adapters.turns import AdapterTurns
from pagewire_engine.block_space_manager import BlockSpaceManager
from pagewire_engine.request import BeamChange, Request, RequestStatus, Sequence
from pagewire_engine.schedule import Draft
from pagewire_engine.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

_HAS_BLOCKS = (RequestStatus.RUNNING, RequestStatus.SWAPPED)

# A preemption is worth a line; a storm of them is not worth a line each.
_PREEMPTIONS_PER_WARNING = 50
_TOO_FEW_BLOCKS = (
    "there are not enough free KV blocks for all running requests. This lengthens its answer time. "
    "Give the KV cache more memory (--kv-cache-memory, --gpu-memory-utilization) or run fewer "
    "sequences at a time (--max-num-seqs)."
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
        chunks_prompts: whether a prompt may be computed in parts, a step each. An encoder's tokens
            see those behind them, so that it can't.
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
    chunks_prompts: bool = True
    max_waiting_requests: int = 4096
    max_queue_time_s: float | None = None
    watermark: float = 0.01


class RequestQueues:
    """Three queues: `waiting` in an order of its own, the others by priority, then arrival.

    Attributes:
        waiting: requests without blocks: new ones, and preempted ones to be recomputed.
        running: requests with blocks.
        swapped: requests whose blocks are in host memory; while there is one, no prompt starts.
        blocks: the pool.
        adapters: whose requests may run; None: there are no adapters.
        num_under_way: steps that were launched and have not landed.
        num_preemptions: since the engine's start, by recompute and by swap.
        num_swaps: those of them by swap.
    """

    def __init__(self, settings: SchedulerSettings, adapters: AdapterTurns | None = None) -> None:
        self.settings = settings
        self.adapters = adapters
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
        self.num_under_way = 0
        self._forgotten: list[int] = []
        # Sequences that ended while steps are under way: after which step they are freed.
        self._last_launched = 0
        self._unfreed: deque[tuple[int, Sequence]] = deque()
        self._unreleased: deque[tuple[int, int]] = deque()

    def add(self, request: Request) -> None:
        """Puts a request into `waiting`.

        Raises:
            InvalidArgumentError: it could never run here.
        """
        settings = self.settings
        if request.pooling is not None:
            if request.num_prompt_tokens > settings.max_model_len:
                raise InvalidArgumentError(
                    "prompt_token_ids",
                    f"the prompt has {request.num_prompt_tokens} tokens, and the model takes "
                    f"{settings.max_model_len}",
                )
        elif request.num_prompt_tokens >= settings.max_model_len:
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
        if not self.blocks.can_ever_hold(request):
            raise InvalidArgumentError("prompt_token_ids", _pool_too_small("the request", settings))
        self.waiting.add(request)

    def start(self, request: Request) -> int:
        """Moves a waiting request to `running`, and gives it the blocks of its prefill.

        Returns:
            Tokens of it that were found in the prefix cache.
        """
        self.waiting.remove(request)
        num_cached_tokens = self.blocks.allocate(request)
        self._run(request)
        return num_cached_tokens

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_by_order)

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
        if discard:
            self.blocks.distrust(request)
        for sequence in request.sequences:
            self._free(sequence)
        self._leave_queue(request)

    def _leave_queue(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status in _HAS_BLOCKS:
            queue = self.running if request.status is RequestStatus.RUNNING else self.swapped
            del queue[bisect_left(queue, request.order, key=_by_order)]
        request.status = RequestStatus.FINISHED

    def _free(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks back, as soon as no step under way names them: none names those
        of a request that does not run."""
        if self.num_under_way and sequence.request.status is RequestStatus.RUNNING:
            sequence.publish_at = sys.maxsize
            self._unfreed.append((self._last_launched, sequence))
        else:
            self.blocks.free_sequence(sequence)

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

    def launched(self, step: int) -> None:
        """The step is under way: what is scheduled from now on comes after it."""
        self.num_under_way += 1
        self._last_launched = step

    def landed(self, step: int) -> None:
        """The step is no longer under way, and its results are booked."""
        self.num_under_way -= 1
        while self._unfreed and self._unfreed[0][0] <= step:
            self.blocks.free_sequence(self._unfreed.popleft()[1])
        while self._unreleased and self._unreleased[0][0] <= step:
            self._release(self._unreleased.popleft()[1])

    def release_adapter(self, adapter: int) -> None:
        """A request of this adapter has ended: lets go of it as soon as no step under way uses
        it."""
        if adapter and self.num_under_way:
            self._unreleased.append((self._last_launched, adapter))
        elif adapter:
            self._release(adapter)

    def _release(self, adapter: int) -> None:
        if self.adapters is not None:
            self.adapters.release(adapter)

    @property
    def forgotten(self) -> list[int]:
        """Ids of sequences that the worker knows and need not know any longer."""
        return self._forgotten

    def note_forgotten_told(self) -> None:
        """The worker is told of them with the step that is being scheduled."""
        self._forgotten = []

    def unfreed(self) -> list[Sequence]:
        """Sequences that have ended, and whose blocks a step under way still names."""
        return list(dict.fromkeys(sequence for _, sequence in self._unfreed))

    def is_swappable(self, request: Request) -> bool:
        """Whether a request that is preempted is swapped, where host memory has room."""
        mode = self.settings.preemption_mode
        shares = request.prompt_shared and len(request.live) > 1
        return mode == "swap" or (mode == "auto" and shares)

    def swap_out(self, draft: Draft, request: Request, copies: list[tuple[int, int]]) -> None:
        """Moves a running request's blocks to host memory."""
        unwritten = {destination: source for source, destination in copies}
        draft.swap_out.extend(self.blocks.swap_out(request, unwritten))
        self._leave_queue(request)
        request.status = RequestStatus.SWAPPED
        insort(self.swapped, request, key=_by_order)
        self.num_swaps += 1
        self._count_preemption(request, "swap", _TOO_FEW_BLOCKS)

    def swap_in(self, draft: Draft, request: Request) -> None:
        """Moves a swapped request's blocks back to the device, and the request to `running`."""
        self._leave_queue(request)
        draft.swap_in.extend(self.blocks.swap_in(request))
        self._run(request)
        for sequence in request.live:
            sequence.num_blocks_told = 0

    def recompute(self, request: Request, cause: str = _TOO_FEW_BLOCKS) -> None:
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

    def fail_for_blocks(self, draft: Draft, request: Request) -> None:
        """Fails a request for which the pool is too small."""
        self.remove(request)
        message = _pool_too_small("the request with what it has produced", self.settings)
        draft.failures.append((request, ResourceExhaustedError(message)))


def _by_order(request: Request) -> tuple[int, int]:
    return request.order


def _pool_too_small(what: str, settings: SchedulerSettings) -> str:
    return (
        f"{what} does not fit in the KV cache of {settings.num_blocks} blocks of "
        f"{settings.block_size} tokens even alone; give the engine more KV cache memory "
        "(--kv-cache-memory), or ask for fewer tokens or sequences"
    )
