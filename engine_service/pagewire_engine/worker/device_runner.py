"""Runs steps on a device without waiting for it: the host launches, and the results come later.

The state of sequences is on the device (see `device_batch`). A step in which all sequences decode
reads nothing but that state, so that it can be one graph. Of any other what it computes is told to
the device first, and then its layers can be one; what is left is launched kernel by kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from pagewire.errors import UnavailableError
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import StepPlan, StepResult
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.cuda_graphs import MOST_CHUNKS, GraphSet, StepGraph
from pagewire_engine.worker.device_adapters import DeviceAdapters
from pagewire_engine.worker.device_batch import DeviceBatch, KnownSequence
from pagewire_engine.worker.device_layers import DeviceLayers
from pagewire_engine.worker.device_sampler import DeviceSampler, sampling_row
from pagewire_engine.worker.device_step import DeviceStep
from pagewire_engine.worker.grammar_masks import GrammarMasks
from pagewire_engine.worker.prompt_scores import score_prompts
from pagewire_engine.worker.staging import Downloads, StepArray, Uploads
from pagewire_engine.worker.step_layout import (
    PartsLayout,
    Rows,
    Samples,
    add_parts,
    all_decode,
)
from pagewire_kernels.attention import AttentionBackend
from pagewire_kernels.gpu.batch_inputs import BatchInputs, prepare_decodes, prepare_parts
from pagewire_kernels.gpu.batch_state import Changes, apply_changes
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
        num_layer_replays: other steps whose layers were.
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
        self._layers = DeviceLayers(model, cache, backend, self._inputs, self._adapters)
        self._graphs = GraphSet()
        self._told_rows: list[int] = []
        self._last: DeviceStep | None = None
        self.num_replays = 0
        self.num_layer_replays = 0

    def use_kernels(self, attention: AttentionBackend) -> None:
        """Changes to other kernels between steps; keys and values stay as they are."""
        self._layers.use_kernels(attention)

    @torch.inference_mode()
    def capture(self, graphs: GraphSet) -> None:
        """Lets steps be graphs from now on; captures those that `graphs` is to hold."""
        self._inputs.clear()
        self._told_rows = []
        if self._adapters is not None:
            self._adapters.clear()
        graphs.layers.capture(
            functools.partial(self._layers.of_any_parts, longest=graphs.layers.max_context)
        )
        for decodes in graphs.decodes:
            decodes.capture(functools.partial(self._decode, longest=decodes.max_context))
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
                return DeviceStep(plan.step, (), self._downloads.begin(self._inputs.sampled[:0]))
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

    def _launch_decodes(self, plan: StepPlan, scheduled: list[KnownSequence]) -> DeviceStep:
        num_rows = len(scheduled)
        contexts = [part.start + 1 for part in plan.scheduled]
        graph = self._graphs.find_decode(num_rows, max(contexts))
        num_padded = num_rows if graph is None else graph.num_rows
        special = self._special(scheduled)
        self._tell_rows(scheduled, num_padded, special)
        if self._adapters is not None:
            self._adapters.tell(scheduled, [1] * num_rows, num_padded, self._uploads)
        if graph is None:
            logits = self._decode(num_rows, max(contexts), contexts)
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
            self._apply_changes(self._uploads.send(array), changes)
        self._told_rows = rows

    def _decode(self, num_rows: int, longest: int, contexts: Sequence[int] = ()) -> torch.Tensor:
        """A whole decode step of the first rows, as launches alone. Returns logits [num_rows, V].

        Args:
            num_rows: sequences, padding included.
            longest: no context is longer.
            contexts: what the host knows of them, for backends that can't be captured.
        """
        inputs = self._inputs
        prepare_decodes(self._batch.state, inputs, num_rows, self._cache.block_size)
        adapter_rows = self._layers.use_adapters(num_rows)
        hidden = self._layers.of_decodes(num_rows, longest, contexts)
        logits = self._model.compute_logits(hidden, adapter_rows)
        self._sampler.sample(
            logits,
            inputs.slots[:num_rows],
            inputs.sampled[:num_rows],
            inputs.holds[:num_rows],
            inputs.row_starts[:num_rows],
        )
        return logits

    def _launch_parts(self, plan: StepPlan, scheduled: list[KnownSequence]) -> DeviceStep:
        array, samples = StepArray(), Samples.of(plan, self._batch)
        special = self._special(samples.sequences)
        changes = self._batch.collect(array, None)
        samples.add_to(array, special)
        layout = add_parts(array, plan, scheduled, samples, self._cache.block_size)
        graph = self._layers_graph(layout)
        parts = layout.parts
        # Kernels would read and write beyond the inputs.
        assert parts.num_tokens <= len(self._inputs.token_ids), "a step has more than its tokens"
        if graph is not None:
            parts = replace(parts, room=(len(self._inputs.slots), graph.num_rows))
        sent = self._uploads.send(array)
        self._apply_changes(sent, changes)
        prepare_parts(self._batch.state, self._inputs, sent, parts, self._cache.block_size)
        num_rows = parts.room[1]
        if self._adapters is not None:
            lengths = [part.num_tokens for part in plan.scheduled]
            self._adapters.tell(scheduled, lengths, num_rows, self._uploads)
        adapter_rows = self._layers.use_adapters(num_rows)
        step = DeviceStep(plan.step, samples.sequences)
        if graph is None:
            hidden = self._launch_layers(step, plan, scheduled, layout, adapter_rows)
        else:
            hidden = graph.replay()
            self.num_layer_replays += 1
        if samples.sequences:
            hidden = hidden[: parts.num_wanted]
            self._sample_parts(step, samples, sent, hidden, adapter_rows, special)
        else:
            step.download = self._downloads.begin(self._inputs.sampled[:0])
        return step

    def _layers_graph(self, layout: PartsLayout) -> StepGraph | None:
        """The graph for the layers of that step, if there is one."""
        if layout.num_chunks > MOST_CHUNKS or self._batch.scores_prompts:
            return None
        return self._graphs.layers.find(layout.parts.num_tokens, layout.longest)

    def _launch_layers(
        self,
        step: DeviceStep,
        plan: StepPlan,
        scheduled: list[KnownSequence],
        layout: PartsLayout,
        adapter_rows: LoraRows | None,
    ) -> torch.Tensor:
        """The layers of a step that is no graph, and the scores of prompts, which go to the step.
        Returns the hidden states that are sampled from, [R, hidden]."""
        wanted_rows = self._inputs.wanted_rows[: max(layout.parts.num_wanted, 1)]
        if not self._batch.scores_prompts:
            return self._layers.of_wanted(layout, wanted_rows)
        hidden = self._layers.of_parts(layout)
        step.prompt_logprobs = score_prompts(
            self._model,
            plan.scheduled,
            [each.new for each in scheduled],
            layout.starts,
            hidden,
            adapter_rows,
        )
        return hidden.index_select(0, wanted_rows)

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
        wanted_rows = self._inputs.wanted_rows[: len(hidden)]
        logits = self._model.compute_logits(
            hidden, None if adapter_rows is None else adapter_rows.take(wanted_rows)
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

    def _apply_changes(self, sent: torch.Tensor, changes: Changes) -> None:
        """Takes what the host has told into the state and the rows of decodes."""
        inputs = self._inputs
        apply_changes(self._batch.state, sent, changes, inputs.slots, inputs.holds)

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
