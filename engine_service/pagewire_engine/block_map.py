"""A window into the engine: who holds which block, and what the last step computed.

The loop's thread takes a `Snapshot`, which costs it plain copies of lists; what is made of them is
the reader's work. Plain data, without sockets and protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pagewire_engine.request import Request, RequestStatus
from pagewire_engine.scheduler import Schedule, Scheduler

FREE, HELD, SHARED, CACHED = range(4)
MAX_WAITING_SHOWN = 256
_STATE_OF_COUNT = bytes([FREE, HELD]) + bytes([SHARED]) * 254


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request at the moment of a snapshot.

    Attributes:
        blocks: that its sequences hold, each once; ~n stands for block n of host memory.
        num_computed_tokens: of the sequence that is furthest.
        num_output_tokens: of all its sequences.
    """

    request_id: str
    status: RequestStatus
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps.

    Attributes:
        step: number of the last step.
        reference_counts: how many sequences hold each block.
        cached_blocks: blocks that nobody holds and that are kept for their prefix.
        cpu_reference_counts: the same of blocks of host memory.
        requests: running, swapped and the first waiting ones; at the end those of the last step
            that have ended.
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


def take_snapshot(scheduler: Scheduler, schedule: Schedule | None, step: int) -> Snapshot:
    """Copies what there is to see. For the thread that runs the scheduler.

    Args:
        scheduler: with its queues and blocks.
        schedule: of the last step, if there was one.
        step: its number.
    """
    waiting = islice(scheduler.waiting, MAX_WAITING_SHOWN)
    shown: dict[Request, int] = {}
    for request in (*scheduler.running, *scheduler.swapped, *waiting):
        shown.setdefault(request, len(shown))
    computed = schedule.sequences if schedule is not None else []
    step_requests = [shown.setdefault(s.request, len(shown)) for s in computed]
    entries = schedule.plan.scheduled if schedule is not None else []
    blocks = scheduler.blocks
    return Snapshot(
        step=step,
        reference_counts=blocks.reference_counts(),
        cached_blocks=blocks.cached_blocks(),
        cpu_reference_counts=blocks.cpu_reference_counts(),
        requests=[_request_snapshot(scheduler, request) for request in shown],
        step_requests=step_requests,
        step_tokens=[entry.num_tokens for entry in entries],
        num_decodes=schedule.num_decodes if schedule is not None else 0,
    )


def block_states(reference_counts: Sequence[int], cached_blocks: Iterable[int] = ()) -> bytes:
    """One byte a block: FREE, HELD by one sequence, SHARED by several, or CACHED."""
    try:
        counts = bytes(reference_counts)
    except ValueError:  # one that more than 255 share
        counts = bytes(min(count, 255) for count in reference_counts)
    states = bytearray(counts.translate(_STATE_OF_COUNT))
    for block in cached_blocks:
        states[block] = CACHED
    return bytes(states)


def _request_snapshot(scheduler: Scheduler, request: Request) -> RequestSnapshot:
    sequences = request.sequences
    return RequestSnapshot(
        request_id=request.request_id,
        status=request.status,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=sum(len(s.output_token_ids) for s in sequences),
        num_computed_tokens=max(s.num_computed_tokens for s in sequences),
        blocks=scheduler.blocks.held_blocks(request),
    )
