"""An engine over the fake executor, and a recorder that holds it to its promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.errors import PagewireError
from pagewire.outputs import FinishReason, PositionLogprobs
from pagewire.sampling_params import SamplingParams
from pagewire_engine.engine import Engine
from pagewire_engine.outputs import SequenceOutput, StepOutputs
from pagewire_engine.queues import SchedulerSettings
from pagewire_engine.step import StepPlan
from pagewire_engine.submission import SequencePast, Submission
from tests.fakes.fake_executor import FakeExecutor

BLOCK_SIZE = 4
EOS = 1


def settings(**changes: Any) -> SchedulerSettings:
    """Small but sufficient: 32 blocks of 4 tokens."""
    values: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "block_size": BLOCK_SIZE,
        "num_blocks": 32,
    }
    return SchedulerSettings(**(values | changes))


def submission(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    tenant: str = "",
    past: Sequence[SequencePast] = (),
    **params: Any,
) -> Submission:
    """Greedy, 8 tokens, unless told otherwise; end-of-sequence is ignored."""
    values: dict[str, Any] = {"temperature": 0.0, "seed": 7, "max_tokens": 8, "ignore_eos": True}
    return Submission(
        request_id,
        list(prompt),
        SamplingParams(**(values | params)),
        priority=priority,
        tenant=tenant,
        past=list(past),
        resubmission=bool(past),
    )


@dataclass
class Recorded:
    """What was told of one request, checked as it came (invariants 2 and 5)."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    ends: dict[int, SequenceOutput] = field(default_factory=dict)
    num_logprobs: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    vector: list[float] | None = None
    error: PagewireError | None = None


class Harness:
    """Runs an engine step by step; after each, the pool must add up (invariant 1)."""

    def __init__(
        self,
        scheduler_settings: SchedulerSettings | None = None,
        *,
        vocab_size: int = 1000,
        on_execute: Callable[[StepPlan], None] | None = None,
        overlaps_steps: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings = scheduler_settings or settings()
        self.plans: list[StepPlan] = []
        self.executor = FakeExecutor(
            self.settings.num_blocks,
            self.settings.block_size,
            vocab_size,
            num_cpu_blocks=self.settings.num_cpu_blocks,
            on_execute=on_execute,
        )
        execute = self.executor.execute

        def recording_execute(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return execute(plan)

        self.executor.execute = recording_execute  # type: ignore[method-assign]
        extra: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.engine = Engine(
            self.executor,
            eos_token_ids=[EOS],
            settings=self.settings,
            overlaps_steps=overlaps_steps,
            **extra,
        )
        self.requests: dict[str, Recorded] = {}

    def add(self, *submissions: Submission) -> None:
        for each in submissions:
            self.engine.add(each)
            recorded = self.requests[each.request_id] = Recorded()
            for past in each.past:
                recorded.tokens[past.index] = list(past.output_token_ids)

    def step(self) -> StepOutputs:
        outputs = self.engine.step()
        self.engine.queues.blocks.check()
        for output in outputs.sequences:
            self._record(output)
        for told in outputs.prompt_logprobs:
            recorded = self.requests[told.request_id]
            assert told.start == len(recorded.prompt_logprobs) + 1, "a gap, or a repeat"
            recorded.prompt_logprobs += told.positions
        for failure in outputs.failures:
            recorded = self.requests[failure.request_id]
            assert recorded.error is None, "a request failed twice"
            recorded.error = failure.error
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        """To the end of all requests; then nothing may be held."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"no end after {max_steps} steps"
        stats = self.engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert self.engine.queues.blocks.num_free_cpu_blocks == self.settings.num_cpu_blocks
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0

    def tokens(self, request_id: str) -> list[list[int]]:
        recorded = self.requests[request_id]
        return [recorded.tokens[index] for index in sorted(recorded.tokens)]

    def _record(self, output: SequenceOutput) -> None:
        recorded = self.requests[output.request_id]
        assert recorded.error is None, "told of a request that failed"
        assert output.sequence_index not in recorded.ends, "told of a sequence that ended"
        tokens = recorded.tokens.setdefault(output.sequence_index, [])
        assert output.start == len(tokens), "a gap, or a repeat"
        tokens += output.token_ids
        assert output.num_tokens == len(tokens)
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.token_ids)
            recorded.num_logprobs += len(output.logprobs)
        if output.vector is not None:
            assert output.finish_reason is FinishReason.STOP, "a vector is the end"
            assert not tokens, "what pools has no tokens"
            recorded.vector = output.vector
        if output.finish_reason is not None:
            assert output.times is not None
            recorded.ends[output.sequence_index] = output
            recorded.reasons[output.sequence_index] = output.finish_reason
        else:
            assert output.token_ids, "nothing was told"


def alone(request: Submission, *, vocab_size: int = 1000) -> list[list[int]]:
    """What a request answers when it has a large pool for itself, each prompt in one step and
    computed whole."""
    harness = Harness(
        settings(
            num_blocks=256,
            max_num_batched_tokens=2048,
            max_num_seqs=128,
            enable_prefix_caching=False,
        ),
        vocab_size=vocab_size,
    )
    harness.add(request)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions == 0
    assert harness.requests[request.request_id].error is None
    return harness.tokens(request.request_id)
