"""What the engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.histogram import Histogram, HistogramCounts
from pagewire_engine.queues import RequestQueues

# vLLM's buckets of `iteration_tokens_total`.
_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15,
    0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; the fields of pagewire.v1.GetStatsResponse that the engine core knows.

    Counters run since the engine's start. `num_prefill_chunks` counts every piece of a prefill, a
    prompt computed in one step being one: more chunks than prefills means that prompts were split.
    `num_swaps` is of the preemptions those that moved blocks to host memory. `num_block_copies`
    counts blocks copied because a sequence was to write where others read, `num_beam_forks` beams
    that went on from another's past, `num_overlapped_steps` steps launched while the one before
    was under way, `num_steps_out_of_memory` steps for which the device had no memory, so that they
    were tried in parts. `prefix_cache_queries` and `prefix_cache_hits` count prompt
    tokens. The `step_*` fields are of the last step; `step_time_s` is in seconds. The histograms
    are of all steps that computed something: `iteration_tokens` of the tokens computed in each,
    `step_time` of its seconds.
    """

    step: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_requests_finished: int = 0
    num_requests_failed: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_time_s: float = 0.0
    num_prefill_chunks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_cpu_blocks: int = 0
    num_free_cpu_blocks: int = 0
    num_swaps: int = 0
    iteration_tokens: HistogramCounts = field(default_factory=HistogramCounts)
    step_time: HistogramCounts = field(default_factory=HistogramCounts)
    num_block_copies: int = 0
    num_beam_forks: int = 0
    num_overlapped_steps: int = 0
    num_steps_out_of_memory: int = 0


@dataclass(slots=True)
class EngineCounters:
    """What only ever grows, and the last step's figures; written by the engine's thread alone."""

    step: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_requests_finished: int = 0
    num_requests_failed: int = 0
    num_prefill_chunks: int = 0
    num_block_copies: int = 0
    num_beam_forks: int = 0
    num_overlapped_steps: int = 0
    num_steps_out_of_memory: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_time_s: float = 0.0
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS))
    step_time: Histogram = field(default_factory=lambda: Histogram(_SECONDS_BOUNDS))

    def count_step_end(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens, and has taken so long."""
        self.step_prefill_tokens = prefill_tokens
        self.step_decode_tokens = decode_tokens
        self.step_time_s = seconds
        if prefill_tokens + decode_tokens:
            self.iteration_tokens.observe(prefill_tokens + decode_tokens)
            self.step_time.observe(seconds)


def take_stats(counters: EngineCounters, queues: RequestQueues) -> EngineStats:
    """A snapshot. Safe from any thread: each figure is read at once, not all at the same time."""
    blocks = queues.blocks
    return EngineStats(
        step=counters.step,
        num_waiting=len(queues.waiting),
        num_running=len(queues.running),
        num_swapped=len(queues.swapped),
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_cpu_blocks=blocks.num_cpu_blocks,
        num_free_cpu_blocks=blocks.num_free_cpu_blocks,
        num_preemptions=queues.num_preemptions,
        num_swaps=queues.num_swaps,
        prefix_cache_queries=blocks.num_tokens_queried,
        prefix_cache_hits=blocks.num_tokens_hit,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens,
        num_requests_finished=counters.num_requests_finished,
        num_requests_failed=counters.num_requests_failed,
        step_prefill_tokens=counters.step_prefill_tokens,
        step_decode_tokens=counters.step_decode_tokens,
        step_time_s=counters.step_time_s,
        num_prefill_chunks=counters.num_prefill_chunks,
        iteration_tokens=counters.iteration_tokens.snapshot(),
        step_time=counters.step_time.snapshot(),
        num_block_copies=counters.num_block_copies,
        num_beam_forks=counters.num_beam_forks,
        num_overlapped_steps=counters.num_overlapped_steps,
        num_steps_out_of_memory=counters.num_steps_out_of_memory,
    )
