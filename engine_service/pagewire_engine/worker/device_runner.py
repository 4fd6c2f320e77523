"""Runs steps on a device without waiting for it: the host launches, and the results come later.

The state of sequences is on the device (see `device_batch`). A step in which all sequences decode
reads nothing but that state, so that it can be one graph; any other is launched kernel by kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from pagewire.errors import UnavailableError
from pagewire_engine.executor.base import LandedStep, PendingStep
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ForwardContext
from pagewire_engine.step import StepPlan, StepResult
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.cuda_graphs import DecodeGraphs
from pagewire_engine.worker.device_adapters import DeviceAdapters
from pagewire_engine.worker.device_batch import DeviceBatch, KnownSequence
from pagewire_engine.worker.device_sampler import DeviceSampler, sampling_row
from pagewire_engine.worker.device_step import DeviceStep
from pagewire_engine.worker.grammar_masks import GrammarMasks
from pagewire_engine.worker.prompt_scores import score_prompts
from pagewire_engine.worker.staging import Downloads, StepArray, Uploads
from pagewire_engine.worker.step_layout import (
    Rows,
    Samples,
    all_decode,
    part_records,
    token_ids,
)
from pagewire_kernels.attention import AttentionBackend, AttentionMetadata
from pagewire_kernels.gpu.batch_state import (
    BatchInputs,
    apply_changes,
    prepare_decodes,
    prepare_parts,
)
from pagewire_kernels.gpu.sampling import PADDING
from pagewire_kernels.lora import LoraRows


class DeviceRunner:
    """Owns the model and the sequences' state on a device; keys and values are the cache's.

    Args:
        model: whose steps are run.
        cache: the blocks.
        backend: attention that reads nothing of a decode step but tensors.
        vocab_size: rows of the output embedding.
        eos_token_ids: the model's end-of-sequence ids.
        device: where all of it is.
        max_num_seqs: most sequences of a step.
        max_num_tokens: most tokens of a step.
        max_model_len: longest sequence.
        grammars: of the constraints that requests have. None: none is served.
        adapters: those that requests may name. None: none.

    Attributes:
        num_replays: decode steps that were a graph.
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
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        grammars: GrammarCompiler | None = None,
        adapters: WorkerAdapters | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._device = device
        width = -(-max_model_len // cache.block_size)
        self._batch = DeviceBatch(
            max_num_seqs=max_num_seqs,
            width=width,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            device=device,
        )
        self._inputs = BatchInputs.empty(
            max_num_seqs, max(max_num_tokens, max_num_seqs), width, device
        )
        self._uploads = Uploads(device)
        self._downloads = Downloads(device)
        self._sampler = DeviceSampler(
            self._batch, vocab_size, len(set(eos_token_ids)), max_num_seqs, self._downloads
        )
        if grammars is None:
            grammars = GrammarCompiler(dict, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._grammar_masks = GrammarMasks(grammars, vocab_size, eos_token_ids)
        self._adapters: DeviceAdapters | None = None
        if adapters is not None:
            self._adapters = DeviceAdapters(adapters, max(max_num_tokens, max_num_seqs), device)
        self._graphs = DecodeGraphs()
        self._told_rows: list[int] = []
        self._last: DeviceStep | None = None
        self.num_replays = 0

    def use_kernels(self, attention: AttentionBackend) -> None:
        """Changes to other kernels between steps; keys and values stay as they are."""
        self._backend = attention

    @torch.inference_mode()
    def capture(self, graphs: DecodeGraphs) -> None:
        """Lets decode steps be graphs from now on; captures those that `graphs` is to hold."""
        self._inputs.slots.fill_(PADDING)
        self._told_rows = []
        if self._adapters is not None:
            self._adapters.clear()
        graphs.capture(self._decode)
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins a step; see Executor.launch."""
        try:
            scheduled = self._batch.apply(plan)
            self._grammar_masks.apply(plan)
            self._cache.swap_out(plan.swap_out)
            self._cache.swap_in(plan.swap_in)
            self._cache.copy_blocks(plan.block_copies)
            if not scheduled:
                return LandedStep(StepResult(plan.step, []))
            self._batch.place(plan, scheduled, self._land)
            if all_decode(plan, scheduled):
                step = self._launch_decodes(plan, scheduled)
            else:
                step = self._launch_parts(plan, scheduled)
        except Exception as error:
            self._check_device(error)  # before anything else is asked of it
            self._batch.lose(plan)
            self._told_rows = []
            raise
        for sequence in step.sequences:
            if not sequence.is_beam:
                sequence.num_tokens += 1
        self._last = step
        return step

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches a step and waits for its result."""
        return self.launch(plan).result()

    # -- steps in which every sequence decodes ---------------------------------------------------

    def _launch_decodes(self, plan: StepPlan, scheduled: list[KnownSequence]) -> DeviceStep:
        num_rows = len(scheduled)
        contexts = [part.start + 1 for part in plan.scheduled]
        graph = self._graphs.find(num_rows, contexts)
        num_padded = num_rows if graph is None else graph.num_rows
        special = self._special(scheduled)
        self._tell_rows(scheduled, num_padded, special)
        if self._adapters is not None:
            self._adapters.tell(scheduled, [1] * num_rows, num_padded, self._uploads)
        if graph is None:
            logits = self._decode(num_rows, contexts)
        else:
            logits = graph.replay()
            self.num_replays += 1
        step = DeviceStep(plan.step, scheduled)
        self._finish(step, logits, self._inputs.slots, special)
        return step

    def _tell_rows(
        self,
        scheduled: list[KnownSequence],
        num_padded: int,
        special: Rows,
    ) -> None:
        """Brings the device's state up to date, and names the sequence of each row, if that is
        another than in the decode step before."""
        rows = [sequence.slot for sequence in scheduled]
        rows += [PADDING] * (num_padded - len(rows))
        holds = [0] * num_padded
        for row, sequence in special:
            holds[row] = int(sequence.is_held)
        rows += holds
        news = None if rows == self._told_rows else rows
        array = StepArray()
        changes = self._batch.collect(array, news)
        if array.size:
            apply_changes(self._batch.state, self._inputs, self._uploads.send(array), changes)
        self._told_rows = rows

    def _decode(self, num_rows: int, contexts: Sequence[int] = ()) -> torch.Tensor:
        """A whole decode step of the first rows, as launches alone. Returns logits [num_rows, V].

        Args:
            num_rows: sequences, padding included.
            contexts: what the host knows of them, for backends that can't be captured.
        """
        inputs = self._inputs
        prepare_decodes(self._batch.state, inputs, num_rows, self._cache.block_size)
        metadata = AttentionMetadata(
            query_start_locations=inputs.row_starts[: num_rows + 1],
            context_lengths=inputs.context_lengths[:num_rows],
            block_tables=inputs.block_tables[:num_rows],
            slot_mapping=inputs.slot_mapping[:num_rows],
            num_decodes=num_rows,
            host_query_start_locations=list(range(num_rows + 1)),
            host_context_lengths=list(contexts),
        )
        adapter_rows = self._adapter_rows(num_rows)
        logits = self._model.compute_logits(self._forward(num_rows, metadata), adapter_rows)
        self._sampler.sample(
            logits,
            inputs.slots[:num_rows],
            inputs.sampled[:num_rows],
            inputs.holds[:num_rows],
            inputs.row_starts[:num_rows],
        )
        return logits

    # -- steps of any kind -----------------------------------------------------------------------

    def _launch_parts(self, plan: StepPlan, scheduled: list[KnownSequence]) -> DeviceStep:
        array, samples = StepArray(), Samples.of(plan, self._batch)
        special = self._special(samples.sequences)
        changes = self._batch.collect(array, None)
        starts = list(itertools.accumulate((part.num_tokens for part in plan.scheduled), initial=0))
        parts_at = array.add(part_records(plan, scheduled, starts))
        tokens_at = array.add(token_ids(plan, scheduled))
        samples.add_to(array, starts, special)
        sent = self._uploads.send(array)
        contexts = [part.start + part.num_tokens for part in plan.scheduled]
        apply_changes(self._batch.state, self._inputs, sent, changes)
        prepare_parts(
            self._batch.state,
            self._inputs,
            sent,
            parts_at=parts_at,
            num_parts=len(scheduled),
            tokens_at=tokens_at,
            longest=max(part.num_tokens for part in plan.scheduled),
            width=-(-max(contexts) // self._cache.block_size),
            block_size=self._cache.block_size,
        )
        if self._adapters is not None:
            lengths = [part.num_tokens for part in plan.scheduled]
            self._adapters.tell(scheduled, lengths, starts[-1], self._uploads)
        adapter_rows = self._adapter_rows(starts[-1])
        hidden = self._forward(starts[-1], self._metadata(plan, starts, contexts))
        step = DeviceStep(plan.step, samples.sequences)
        step.prompt_logprobs = score_prompts(
            self._model,
            plan.scheduled,
            [each.new for each in scheduled],
            starts,
            hidden,
            adapter_rows,
        )
        if samples.sequences:
            self._sample_parts(step, samples, sent, hidden, adapter_rows, special)
        return step

    def _metadata(
        self, plan: StepPlan, starts: list[int], contexts: list[int]
    ) -> AttentionMetadata:
        inputs, num_parts = self._inputs, len(contexts)
        one = itertools.takewhile(lambda part: part.num_tokens == 1, plan.scheduled)
        return AttentionMetadata(
            query_start_locations=inputs.query_starts[: num_parts + 1],
            context_lengths=inputs.context_lengths[:num_parts],
            block_tables=inputs.block_tables[:num_parts],
            slot_mapping=inputs.slot_mapping[: starts[-1]],
            num_decodes=sum(1 for _ in one),
            host_query_start_locations=starts,
            host_context_lengths=contexts,
        )

    def _sample_parts(
        self,
        step: DeviceStep,
        samples: Samples,
        sent: torch.Tensor,
        hidden: torch.Tensor,
        adapter_rows: LoraRows | None,
        special: Rows,
    ) -> None:
        count = len(samples.sequences)
        last_rows = sent[samples.last_at : samples.last_at + len(samples.last_of)]
        logits = self._model.compute_logits(
            hidden.index_select(0, last_rows),
            None if adapter_rows is None else adapter_rows.take(last_rows),
        )
        slots = sent[samples.slots_at : samples.slots_at + count]
        logit_rows = sent[samples.rows_at : samples.rows_at + count]
        self._sampler.sample(
            logits,
            slots,
            self._inputs.sampled[:count],
            sent[samples.holds_at : samples.holds_at + count],
            logit_rows,
        )
        self._finish(step, logits, slots, special, samples.rows, logit_rows)

    # -- what both kinds have in common ----------------------------------------------------------

    def _forward(self, num_tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
        """Hidden states [num_tokens, hidden] of the inputs that were prepared."""
        context = ForwardContext(
            self._backend, metadata, self._cache.key_caches, self._cache.value_caches
        )
        inputs = self._inputs
        hidden: torch.Tensor = self._model(
            inputs.token_ids[:num_tokens], inputs.positions[:num_tokens], context
        )
        return hidden

    def _adapter_rows(self, num_tokens: int) -> LoraRows | None:
        """The adapters of the step's rows, where a graph finds them too; for the layers as well."""
        return None if self._adapters is None else self._adapters.use(num_tokens)

    def _special(self, sequences: Sequence[KnownSequence]) -> Rows:
        """Rows of which more is asked than their tokens."""
        if self._batch.all_plain:
            return []
        return [(row, each) for row, each in enumerate(sequences) if not each.is_plain]

    def _finish(
        self,
        step: DeviceStep,
        logits: torch.Tensor,
        slots: torch.Tensor,
        special: Rows,
        sources: Sequence[int] = (),
        logit_rows: torch.Tensor | None = None,
    ) -> None:
        """Sends for the tokens, and for what else was asked.

        Args:
            step: which is to hold it.
            logits: [L, V].
            slots: of the rows.
            special: rows of which more is asked.
            sources: the row of logits of each row; none: its own.
            logit_rows: the same on the device.
        """
        sampled = self._inputs.sampled[: len(step.sequences)]
        if special:
            sources = sources or range(len(logits))
            self._sample_constrained(step, logits, slots, special, sources, logit_rows)
            step.logprobs = self._sampler.logprobs(logits, special, sampled, logit_rows)
            step.candidates, step.failed_beams = self._sampler.candidates(logits, special, sources)
        step.download = self._downloads.begin(sampled)

    def _sample_constrained(
        self,
        step: DeviceStep,
        logits: torch.Tensor,
        slots: torch.Tensor,
        special: Rows,
        sources: Sequence[int],
        logit_rows: torch.Tensor | None,
    ) -> None:
        """Samples the rows under a constraint. What it allows depends on the tokens so far, which
        are waited for while the device computes the logits."""
        constrained = [(row, each) for row, each in special if each.is_constrained]
        if not constrained:
            return
        self._land()
        masks = self._grammar_masks.masks(
            [sampling_row(each, sources[row]) for row, each in constrained]
        )
        step.refused = masks.refused
        kept = [(row, each) for row, each in constrained if each.sequence_id in masks.rows]
        if kept:
            sampled = self._inputs.sampled[: len(step.sequences)]
            self._sampler.sample_constrained(logits, kept, masks, slots, sampled, logit_rows)

    def _land(self) -> None:
        """Waits for the step that was launched last."""
        if self._last is not None:
            self._last.result()

    def _check_device(self, error: Exception) -> None:
        """Raises UnavailableError where a launch failed since the device has: no request's fault,
        and nothing that can be tried again."""
        if self._device.type != "cuda" or isinstance(error, UnavailableError):
            return
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            raise UnavailableError(f"{self._device} has failed: {error}") from error
