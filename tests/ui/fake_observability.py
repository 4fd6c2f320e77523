"""An engine to look at, for tests of the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc

from pagewire.v1 import engine_pb2, operations_pb2_grpc


class FakeObservability(operations_pb2_grpc.ObservabilityServicer):
    """Shows 300 blocks: request 1 holds 20 of them, 4 are shared, 30 cached; and 8 in host memory,
    of which request 3, swapped, holds 2. With each look 40 tokens more were generated, and one
    request more had its first token after a quarter of a second.

    Attributes:
        num_waiting: what it tells of the queue; tests change it.
        allowed: whether clients may watch.
        tokens: that were generated so far.
        looks: how often it showed the blocks.
        looked: set once it has.
    """

    def __init__(self) -> None:
        self.num_waiting = 3
        self.allowed = True
        self.looks = 0
        self.tokens = 0
        self.looked = threading.Event()

    def WatchStats(
        self, request: engine_pb2.GetStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[engine_pb2.GetStatsResponse]:
        """A message each interval."""
        if not self.allowed:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "WatchStats is off on this server; start the frontend with --allow-watch-stats",
            )
        while context.is_active():
            yield self._stats(request.with_window)
            if not request.interval_ms:
                return
            time.sleep(request.interval_ms / 1000)

    def _stats(self, with_window: bool) -> engine_pb2.GetStatsResponse:
        stats = engine_pb2.GetStatsResponse(
            num_running=2,
            num_waiting=self.num_waiting,
            num_blocks=300,
            num_free_blocks=246,
            num_cached_blocks=30,
            prefix_cache_queries=200,
            prefix_cache_hits=50,
            step_time_s=0.0125,
        )
        self.tokens += 40
        stats.num_generation_tokens = self.tokens
        stats.time_to_first_token.counts.append(self.tokens // 40)
        stats.time_to_first_token.sum = 0.25 * self.tokens / 40
        if with_window:
            self.looks += 1
            self.looked.set()
            window = stats.window
            window.blocks = bytes([1] * 20 + [2] * 4 + [3] * 30 + [0] * 246)
            view = engine_pb2.EngineRequestView
            window.requests.add(id="1", state=view.STATE_RUNNING, blocks=range(20))
            window.requests.add(id="2", state=view.STATE_RUNNING, num_prompt_tokens=77)
            window.requests.add(id="3", state=view.STATE_SWAPPED, cpu_blocks=[0, 5])
            window.cpu_blocks = bytes([1, 0, 0, 0, 0, 1, 0, 0])
            window.step.step = 42
            window.step.request.extend([0, 1])
            window.step.num_tokens.extend([1, 33])
            window.step.num_decodes = 1
        return stats
