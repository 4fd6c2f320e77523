"""Runs the steps of a causal model that pools: its prompts come in chunks, through the KV cache."""

from __future__ import annotations

import torch

from pagewire.pooling import PoolingParams
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ForwardContext
from pagewire_engine.pooler_config import PoolerConfig
from pagewire_engine.step import ScheduledSequence, StepPlan, StepResult
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.input_batch import InputBatch
from pagewire_engine.worker.pooler import Pooler
from pagewire_kernels.attention import AttentionBackend


class PoolingRunner:
    """Owns the model and what is known of its sequences; keys and values are the cache's.

    Of a mean it keeps the sum of each chunk by where that begins, so that a chunk which is computed
    twice counts once; in float64, so that the chunks' lengths leave no trace.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheEngine,
        backend: AttentionBackend,
        config: PoolerConfig,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._batch = InputBatch(cache.block_size, device)
        self._pooler = Pooler(config)
        self._takes_mean = config.pooling_type == "mean"
        self._sums: dict[int, dict[int, torch.Tensor]] = {}

    def use_kernels(self, attention: AttentionBackend) -> None:
        """Changes to other kernels between steps; keys and values stay as they are."""
        self._backend = attention

    def launch(self, plan: StepPlan) -> PendingStep:
        """Computes one step; see Executor.launch."""
        return LandedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see Executor.launch for what an exception leaves behind."""
        self._batch.apply(plan)
        for sequence_id in plan.forgotten:
            self._sums.pop(sequence_id, None)
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return StepResult(plan.step, [])
        inputs = self._batch.build(plan.scheduled)
        context = ForwardContext(
            self._backend, inputs.metadata, self._cache.key_caches, self._cache.value_caches
        )
        hidden: torch.Tensor = self._model(inputs.token_ids, inputs.positions, context)
        starts = inputs.metadata.host_query_start_locations
        pooled: list[torch.Tensor] = []
        ended: list[tuple[int, PoolingParams]] = []
        for index, part in enumerate(plan.scheduled):
            rows = hidden[starts[index] : starts[index + 1]]
            if self._takes_mean:
                self._sums.setdefault(part.sequence_id, {})[part.start] = rows.double().sum(0)
            if part.sample_for:
                pooled.append(self._pooled(part, rows))
                asked = self._batch[part.sequence_id].new.pooling
                ended.append((part.sequence_id, asked or PoolingParams()))
        if not ended:
            return StepResult(plan.step, [])
        return self._pooler.result(plan.step, ended, torch.stack(pooled))

    def _pooled(self, part: ScheduledSequence, rows: torch.Tensor) -> torch.Tensor:
        if not self._takes_mean:
            return rows[-1]
        sums = torch.stack(list(self._sums[part.sequence_id].values()))
        return sums.sum(0) / (part.start + part.num_tokens)
