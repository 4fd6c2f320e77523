"""The layers of a step on a device, over the inputs that were made there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.layers import ForwardContext
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.cuda_graphs import MOST_CHUNKS
from pagewire_engine.worker.device_adapters import DeviceAdapters
from pagewire_engine.worker.step_layout import PartsLayout
from pagewire_kernels.attention import AttentionBackend, AttentionMetadata, DeviceCounts
from pagewire_kernels.gpu.batch_inputs import BatchInputs
from pagewire_kernels.lora import LoraRows


class DeviceLayers:
    """Runs the model's layers, as launches alone: what is captured of them is a graph.

    Args:
        model: whose layers they are.
        cache: the blocks.
        backend: attention that reads nothing of a decode step but tensors.
        inputs: of the step.
        adapters: of its rows. None: none.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: CacheEngine,
        backend: AttentionBackend,
        inputs: BatchInputs,
        adapters: DeviceAdapters | None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._inputs = inputs
        self._adapters = adapters

    def use_kernels(self, attention: AttentionBackend) -> None:
        """Changes to other kernels between steps; keys and values stay as they are."""
        self._backend = attention

    def use_adapters(self, num_tokens: int) -> LoraRows | None:
        """The adapters of the step's rows, where a graph finds them too; for the layers as well."""
        return None if self._adapters is None else self._adapters.use(num_tokens)

    def of_decodes(self, num_rows: int, longest: int, contexts: Sequence[int]) -> torch.Tensor:
        """Those of a decode step. Returns the hidden states [num_rows, hidden].

        Args:
            num_rows: sequences, padding included.
            longest: no context is longer.
            contexts: what the host knows of them, for backends that can't be captured.
        """
        inputs = self._inputs
        metadata = AttentionMetadata(
            query_start_locations=inputs.row_starts[: num_rows + 1],
            context_lengths=inputs.context_lengths[:num_rows],
            block_tables=inputs.block_tables[:num_rows, : self._num_blocks(longest)],
            slot_mapping=inputs.slot_mapping[:num_rows],
            num_decodes=num_rows,
            host_query_start_locations=list(range(num_rows + 1)),
            host_context_lengths=list(contexts),
        )
        return self._forward(num_rows, metadata)

    def of_any_parts(self, num_tokens: int, longest: int) -> torch.Tensor:
        """Those of any step of up to so many tokens, whose contexts are no longer than `longest`.
        Returns the hidden states that are sampled from, [R, hidden]."""
        inputs = self._inputs
        num_sequences = len(inputs.slots)
        metadata = AttentionMetadata(
            query_start_locations=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            block_tables=inputs.block_tables[:, : self._num_blocks(longest)],
            slot_mapping=inputs.slot_mapping[:num_tokens],
            num_decodes=min(num_sequences, num_tokens),
            host_query_start_locations=[],
            host_context_lengths=[],
            on_device=DeviceCounts(inputs.num_decodes, MOST_CHUNKS),
        )
        self.use_adapters(num_tokens)
        return self._wanted(num_tokens, metadata, inputs.wanted_rows[:num_tokens])

    def of_parts(self, layout: PartsLayout) -> torch.Tensor:
        """Those of the step that is laid out so. Returns the hidden states of all its tokens,
        [num_tokens, hidden]."""
        return self._forward(layout.parts.num_tokens, self._metadata_of(layout))

    def of_wanted(self, layout: PartsLayout, rows: torch.Tensor) -> torch.Tensor:
        """As `of_parts`, the hidden states of those rows, [R, hidden]."""
        return self._wanted(layout.parts.num_tokens, self._metadata_of(layout), rows)

    def _metadata_of(self, layout: PartsLayout) -> AttentionMetadata:
        inputs, parts = self._inputs, layout.parts
        return AttentionMetadata(
            query_start_locations=inputs.query_starts[: parts.count + 1],
            context_lengths=inputs.context_lengths[: parts.count],
            block_tables=inputs.block_tables[: parts.count, : parts.width],
            slot_mapping=inputs.slot_mapping[: parts.num_tokens],
            num_decodes=parts.num_decodes,
            host_query_start_locations=layout.starts,
            host_context_lengths=layout.contexts,
        )

    def _num_blocks(self, context: int) -> int:
        """Columns of a block table that so long a context takes."""
        return min(-(-context // self._cache.block_size), self._inputs.block_tables.shape[1])

    def _wanted(
        self, num_tokens: int, metadata: AttentionMetadata, rows: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [R, hidden] of those rows."""
        if self._adapters is None:
            return self._forward(num_tokens, metadata, rows)
        # The layers know the adapters of all rows, not of some.
        return self._forward(num_tokens, metadata).index_select(0, rows)

    def _forward(
        self,
        num_tokens: int,
        metadata: AttentionMetadata,
        wanted_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the inputs that were prepared: of all rows, or of those wanted."""
        cache = self._cache
        context = ForwardContext(
            self._backend, metadata, cache.key_caches, cache.value_caches, wanted_rows
        )
        inputs = self._inputs
        hidden: torch.Tensor = self._model(
            inputs.token_ids[:num_tokens], inputs.positions[:num_tokens], context
        )
        return hidden
