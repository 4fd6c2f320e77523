"""What the engine counts about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; the fields of pagewire.v1.GetStatsResponse that the engine core knows.

    Counters run since the engine's start. `num_prefill_chunks` counts every piece of a prefill, a
    prompt computed in one step being one: more chunks than prefills means that prompts were split.
    The `step_*` fields are of the last step; `step_time_s` is in seconds.
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


@dataclass(slots=True)
class EngineCounters:
    """What only ever grows, and the last step's figures; written by the engine's thread alone."""

    step: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_requests_finished: int = 0
    num_requests_failed: int = 0
    num_prefill_chunks: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_time_s: float = 0.0
