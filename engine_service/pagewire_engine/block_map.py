"""A window into the engine: who holds which block, and what the last step computed.

The loop's thread takes a `Snapshot`, which costs it plain copies of lists; what is made of them is
the reader's work. Plain data, without sockets and protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from pagewire_engine.block_space_manager import BlockSpaceManager
from pagewire_engine.queues import RequestQueues
from pagewire_engine.request import Request, RequestStatus
from pagewire_engine.request import Sequence as SequenceOfTokens
from pagewire_engine.schedule import Schedule

FREE, HELD, SHARED, CACHED = range(4)
MAX_WAITING_SHOWN = 256
_STATES_AT_ONCE = 16_384
_STATE_OF_COUNT = bytes([FREE, HELD]) + bytes([SHARED]) * 254


@dataclass(slots=True)  # hundreds a snapshot: frozen, they would take four times as long to make
class RequestSnapshot:
    """A request at the moment of a snapshot.

    Attributes:
        tables: the block table of each of its sequences; ~n stands for block n of host memory.
        num_computed_tokens: of the sequence that is furthest.
        num_output_tokens: of all its sequences.
    """

    request_id: str
    status: RequestStatus
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]

    def blocks(self) -> list[int]:
        """The blocks that its sequences hold, each once."""
        if len(self.tables) == 1:
            return self.tables[0]
        return list(dict.fromkeys(chain.from_iterable(self.tables)))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps.

    Attributes:
        step: number of the last step whose results are booked.
        reference_counts: how many sequences hold each block.
        cached_blocks: blocks that nobody holds and that are kept for their prefix.
        cpu_reference_counts: the same of blocks of host memory.
        requests: running, swapped and the first waiting ones; at the end those of the last step
            that have ended, and those whose blocks a step under way still names.
        step_requests: index into `requests` of each sequence that the last step computed.
        step_tokens: tokens that were computed of each.
        num_decodes: how many of those, from the first on, are decodes.
    """

    step: int
    reference_counts: list[int]
    cached_blocks: list[int]
    cpu_reference_counts: list[int]
    requests: list[RequestSnapshot]
    step_requests: list[int]
    step_tokens: list[int]
    num_decodes: int


def take_snapshot(queues: RequestQueues, schedule: Schedule | None) -> Snapshot:
    """Copies what there is to see. For the thread that runs the engine.

    Args:
        queues: the requests, and the blocks they hold.
        schedule: of the last step whose results are booked, if there was one.
    """
    waiting = islice(queues.waiting, MAX_WAITING_SHOWN)
    shown: dict[Request, int] = {}
    for request in (*queues.running, *queues.swapped, *waiting):
        shown.setdefault(request, len(shown))
    computed = schedule.sequences if schedule is not None else []
    step_requests = [shown.setdefault(s.request, len(shown)) for s in computed]
    entries = schedule.plan.scheduled if schedule is not None else []
    ended: dict[Request, list[SequenceOfTokens]] = {}
    for sequence in queues.unfreed():
        shown.setdefault(sequence.request, len(shown))
        ended.setdefault(sequence.request, []).append(sequence)
    blocks = queues.blocks
    return Snapshot(
        step=schedule.plan.step if schedule is not None else 0,
        reference_counts=blocks.reference_counts(),
        cached_blocks=blocks.cached_blocks(),
        cpu_reference_counts=blocks.cpu_reference_counts(),
        requests=[_request_snapshot(blocks, request, ended.get(request, ())) for request in shown],
        step_requests=step_requests,
        step_tokens=[entry.num_tokens for entry in entries],
        num_decodes=schedule.num_decodes if schedule is not None else 0,
    )


def block_states(
    reference_counts: Sequence[int],
    cached_blocks: Iterable[int] = (),
    pause: Callable[[], None] = lambda: None,
) -> bytes:
    """One byte a block: FREE, HELD by one sequence, SHARED by several, or CACHED. It pauses after
    some tenth of a millisecond's work."""
    states = bytearray()
    for start in range(0, len(reference_counts), _STATES_AT_ONCE):
        part = reference_counts[start : start + _STATES_AT_ONCE]
        try:
            counts = bytes(part)
        except ValueError:  # one that more than 255 share
            counts = bytes(min(count, 255) for count in part)
        states += counts.translate(_STATE_OF_COUNT)
        pause()
    for block in cached_blocks:
        states[block] = CACHED
    return bytes(states)


def _request_snapshot(
    blocks: BlockSpaceManager, request: Request, ended: Iterable[SequenceOfTokens]
) -> RequestSnapshot:
    num_output_tokens = num_computed_tokens = 0
    for sequence in request.sequences:
        num_output_tokens += len(sequence.output_token_ids)
        num_computed_tokens = max(num_computed_tokens, sequence.num_computed_tokens)
    return RequestSnapshot(
        request.request_id,
        request.status,
        request.num_prompt_tokens,
        num_output_tokens,
        num_computed_tokens,
        blocks.copied_tables((*request.live, *ended)),
    )
