"""Runs a step's plan: copies, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Collection

import torch

from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ForwardContext
from pagewire_engine.step import (
    Candidates,
    SampledToken,
    StepPlan,
    StepResult,
)
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.beam_candidates import beam_candidates
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.grammar_masks import GrammarMasks, Masks
from pagewire_engine.worker.input_batch import InputBatch
from pagewire_engine.worker.prompt_scores import score_prompts
from pagewire_engine.worker.sampler import Sampler, SamplingRow
from pagewire_kernels.attention import AttentionBackend, AttentionMetadata
from pagewire_kernels.lora import LoraRows


class ModelRunner:
    """Owns the model, the sequences' state and the sampler; keys and values are the cache's.

    Args:
        grammars: of the constraints that requests have. None: none is served.
        adapters: those that requests may name. None: none.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheEngine,
        backend: AttentionBackend,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        device: torch.device,
        grammars: GrammarCompiler | None = None,
        adapters: WorkerAdapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._cache = cache
        self._backend = backend
        self._batch = InputBatch(cache.block_size, device)
        self._sampler = Sampler(vocab_size, eos_token_ids, device)
        if grammars is None:
            grammars = GrammarCompiler(dict, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._grammar_masks = GrammarMasks(grammars, vocab_size, eos_token_ids)

    def use_kernels(self, attention: AttentionBackend) -> None:
        """Changes to other kernels between steps; keys and values stay as they are."""
        self._backend = attention
        self._sampler.find_kernels()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Computes one step; see Executor.launch."""
        return LandedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; see Executor.launch for what an exception leaves behind."""
        self._batch.apply(plan)
        self._grammar_masks.apply(plan)
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return StepResult(plan.step, [])
        inputs = self._batch.build(plan.scheduled)
        adapter_rows = self._begin_adapters(plan)
        starts = inputs.metadata.host_query_start_locations
        rows, last_rows = self._sampling_rows(plan, starts)
        with self._grammar_masks.ahead(rows) as masks:
            hidden = self._forward(inputs.token_ids, inputs.positions, inputs.metadata)
            new = [self._batch[part.sequence_id].new for part in plan.scheduled]
            told = score_prompts(self._model, plan.scheduled, new, starts, hidden, adapter_rows)
            logits = self._logits(last_rows, hidden, adapter_rows)
            sampled, candidates, failed, refused = self._sample(rows, logits, masks.result())
        for token in sampled:
            self._batch[token.sequence_id].output_token_ids.append(token.token_id)
        for sequence_id, _ in failed + refused:
            # Any token: the next step may be on its way and count on one, though nobody reads it.
            self._batch[sequence_id].output_token_ids.append(0)
        return StepResult(plan.step, sampled, told, failed, candidates, refused)

    def _begin_adapters(self, plan: StepPlan) -> LoraRows | None:
        """The adapter of each of the step's rows; None where no row has one."""
        if self._adapters is None:
            return None
        numbers = [self._batch[part.sequence_id].new.adapter for part in plan.scheduled]
        return self._adapters.begin(numbers, [part.num_tokens for part in plan.scheduled])

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        context = ForwardContext(
            self._backend, metadata, self._cache.key_caches, self._cache.value_caches
        )
        hidden: torch.Tensor = self._model(token_ids, positions, context)
        return hidden

    def _sampling_rows(
        self, plan: StepPlan, starts: list[int]
    ) -> tuple[list[SamplingRow], list[int]]:
        """Who takes a token, each with its row of the logits, and the rows of the batch that these
        are computed from."""
        rows: list[SamplingRow] = []
        last_rows: list[int] = []
        for index, part in enumerate(plan.scheduled):
            if not part.sample_for:
                continue
            rows += [self._sampling_row(member, len(last_rows)) for member in part.sample_for]
            last_rows.append(starts[index + 1] - 1)
        return rows, last_rows

    def _logits(
        self, last_rows: list[int], hidden: torch.Tensor, adapter_rows: LoraRows | None
    ) -> torch.Tensor | None:
        """Of the rows that somebody samples from; None where nobody does."""
        if not last_rows:
            return None
        if len(last_rows) < len(hidden):
            hidden = hidden[last_rows]
            adapter_rows = None if adapter_rows is None else adapter_rows.take(last_rows)
        return self._model.compute_logits(hidden, adapter_rows)

    def _sample(
        self, rows: list[SamplingRow], logits: torch.Tensor | None, masks: Masks
    ) -> tuple[list[SampledToken], list[Candidates], list[tuple[int, str]], list[tuple[int, str]]]:
        """A token for each row, or candidates where it is a beam; who failed, and was refused."""
        if logits is None:
            return [], [], [], []
        rows = masks.less_refused(rows)
        beams = [row for row in rows if row.params.beam_search is not None]
        if not beams:
            sampled, failed = self._sampler.sample(logits, rows, masks, may_overwrite=True)
            return sampled, [], failed, masks.refused
        others = [row for row in rows if row.params.beam_search is None]
        sampled, failed = self._sampler.sample(logits, others, masks)
        candidates, failed_beams = beam_candidates(logits, beams, self._sampler.num_eos_token_ids)
        return sampled, candidates, failed + failed_beams, masks.refused

    def _sampling_row(self, sequence_id: int, row: int) -> SamplingRow:
        state = self._batch[sequence_id]
        return SamplingRow(
            sequence_id=sequence_id,
            row=row,
            sequence_index=state.new.sequence_index,
            seed=state.new.seed,
            params=state.new.sampling_params,
            prompt_token_ids=state.new.prompt_token_ids,
            output_token_ids=state.output_token_ids,
        )
