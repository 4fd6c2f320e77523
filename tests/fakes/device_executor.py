"""The runner of GPUs on the CPU: its kernels by Triton's interpreter, its graphs by running again
what was recorded. To be imported where TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagewire_engine.executor.base import PendingStep
from pagewire_engine.models.base import CausalLM
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.cuda_graphs import GraphSet, StepGraph, StepGraphs
from pagewire_engine.worker.device_runner import DeviceRunner
from pagewire_engine.worker.largest_step import largest_step
from pagewire_kernels.attention import AttentionMetadata
from pagewire_kernels.gpu.sampling import SamplingConfig, SamplingWorkspace
from pagewire_kernels.torch_attention import TorchAttention
from tests.fakes.step_driver import CPU
from tests.fakes.tiny_models import VOCAB_SIZE


class DeviceReadingAttention(TorchAttention):
    """Torch's attention, but all that it knows of a step it reads from the step's tensors, as what
    runs in a graph must; a row without context is padding."""

    name = "triton"
    capturable = True
    captures_chunks = True

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        used = slot_mapping >= 0
        super().write_kv(key[used], value[used], key_cache, value_cache, slot_mapping[used])

    def paged_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        contexts = metadata.context_lengths.tolist()
        num_decodes = metadata.num_decodes
        if metadata.on_device is not None:
            assert not metadata.host_query_start_locations
            assert not metadata.host_context_lengths
            num_decodes = int(metadata.on_device.num_decodes)
        count = sum(length > 0 for length in contexts)
        assert not any(contexts[count:]), "padding among the rows"
        starts = metadata.query_start_locations[: count + 1].tolist()
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        read = AttentionMetadata(
            query_start_locations=metadata.query_start_locations[: count + 1],
            context_lengths=metadata.context_lengths[:count],
            block_tables=metadata.block_tables[:count],
            slot_mapping=metadata.slot_mapping,
            num_decodes=min(num_decodes, count),
            host_query_start_locations=starts,
            host_context_lengths=contexts[:count],
        )
        if count:
            output[: starts[-1]] = super().paged_attention(
                query[: starts[-1]], key_cache, value_cache, read, scale, sliding_window
            )
        return output


class RerunRecorder:
    """Implements Recorder: a replay runs what was recorded, into the recorded result."""

    def record(self, num_rows: int, run: Callable[[], torch.Tensor]) -> StepGraph:
        output = run().clone()
        return StepGraph(num_rows, lambda: output.copy_(run()), output)


class DeviceExecutor:
    """Implements Executor.

    Attributes:
        runner: the runner.
        cache: its blocks.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_tokens: int = 64,
        max_model_len: int = 64,
        graph_sizes: tuple[int, ...] = (),
        layer_sizes: tuple[int, ...] = (),
        max_context: int = 1000,
        eos_token_ids: tuple[int, ...] = (257,),
        grammars: GrammarCompiler | None = None,
        adapters: WorkerAdapters | None = None,
    ) -> None:
        self.model = model
        self.cache = CacheEngine(
            model.kv_shape, num_blocks, block_size, torch.float32, CPU, num_cpu_blocks
        )
        for tensor in (*self.cache.key_caches, *self.cache.value_caches):
            tensor.fill_(float("nan"))  # what was never written must never be read
        self.runner = DeviceRunner(
            model,
            self.cache,
            DeviceReadingAttention(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
            device=CPU,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            grammars=grammars,
            adapters=adapters,
        )
        # Chunks and tiles that fit the vocabulary: the interpreter computes whole ones.
        self.runner._sampler._workspace = SamplingWorkspace(
            max_num_seqs, VOCAB_SIZE, CPU, SamplingConfig(chunk=512, tile=512)
        )
        if layer_sizes:
            # As a worker does it: what that leaves behind must not be in the way of the capture.
            costly = largest_step(max_num_tokens, max_num_seqs, max_model_len, block_size)
            self.runner.execute(costly)
            forgotten = [new.sequence_id for new in costly.new_sequences]
            self.runner.execute(StepPlan(0, forgotten=forgotten))
        recorder = RerunRecorder()
        decodes = StepGraphs(graph_sizes, max_context, recorder)
        layers = StepGraphs(layer_sizes, max_context, recorder)
        self.runner.capture(GraphSet((decodes,), layers))
        self._max_model_len = max_model_len

    @property
    def launches_ahead(self) -> bool:
        return True

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            architecture="tiny",
            dtype="float32",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=self._max_model_len,
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            num_cpu_blocks=self.cache.num_cpu_blocks,
        )

    def launch(self, plan: StepPlan) -> PendingStep:
        return self.runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def shutdown(self) -> None:
        pass
