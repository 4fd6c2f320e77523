"""The engine's figures as the control API tells them."""

from __future__ import annotations

import time
from dataclasses import asdict

from pagewire.delta_frames import Dropped, FrameCounts
from pagewire.v1 import engine_pb2
from pagewire_engine.block_map import Snapshot, block_states
from pagewire_engine.request import RequestStatus
from pagewire_engine.stats import EngineStats

# Blocks that are looked at without a pause, about a tenth of a millisecond's work; a request counts
# as some more than it holds.
_BLOCKS_AT_ONCE, _PER_REQUEST = 1024, 64
_PAUSE_S = 0.0005
_STATES = {
    status: engine_pb2.EngineRequestView.State.Value(f"STATE_{status.name}")
    for status in RequestStatus
}


def stats_message(
    stats: EngineStats,
    *,
    epoch: int,
    num_sessions: int = 0,
    adapters: engine_pb2.AdapterStats | None = None,
    delta_wire: engine_pb2.DeltaWireStats | None = None,
    tls_certificate_expires_at: float = 0.0,
) -> engine_pb2.GetStatsResponse:
    """A snapshot's message; the fields have the same names."""
    return engine_pb2.GetStatsResponse(
        epoch=epoch,
        num_sessions=num_sessions,
        adapters=adapters,
        delta_wire=delta_wire,
        tls_certificate_expires_at=tls_certificate_expires_at,
        **asdict(stats),
    )


def delta_wire_message(frames: FrameCounts) -> engine_pb2.DeltaWireStats:
    """What became of the delta wire's frames."""
    dropped = frames.dropped()
    return engine_pb2.DeltaWireStats(
        num_damaged=dropped[Dropped.DAMAGED],
        num_other_session=dropped[Dropped.OTHER_SESSION],
        num_old_epoch=dropped[Dropped.OLD_EPOCH],
        num_unsent=dropped[Dropped.UNSENT],
        num_refused=dropped[Dropped.REFUSED],
        num_rewinds=frames.num_rewinds,
    )


def window_message(snapshot: Snapshot) -> engine_pb2.EngineWindow:
    """Who holds which block, and what the last step computed.

    It pauses now and then: this thread and the engine's share one interpreter, and a step must not
    wait until a watcher's message is made.
    """
    window = engine_pb2.EngineWindow(
        blocks=block_states(snapshot.reference_counts, snapshot.cached_blocks, _pause),
        cpu_blocks=block_states(snapshot.cpu_reference_counts, pause=_pause),
        step=engine_pb2.StepComposition(
            step=snapshot.step,
            request=snapshot.step_requests,
            num_tokens=snapshot.step_tokens,
            num_decodes=snapshot.num_decodes,
        ),
    )
    looked_at = 0
    for request in snapshot.requests:
        blocks = request.blocks()
        cpu_blocks: list[int] = []
        if blocks and min(blocks) < 0:
            cpu_blocks = [~block for block in blocks if block < 0]
            blocks = [block for block in blocks if block >= 0]
        window.requests.add(
            id=request.request_id,
            state=_STATES[request.status],
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_computed_tokens=request.num_computed_tokens,
            blocks=blocks,
            cpu_blocks=cpu_blocks,
        )
        looked_at += _PER_REQUEST + len(blocks)
        if looked_at >= _BLOCKS_AT_ONCE:
            looked_at = 0
            _pause()
    return window


def _pause() -> None:
    time.sleep(_PAUSE_S)
