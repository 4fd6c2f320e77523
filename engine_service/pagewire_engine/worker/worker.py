"""One device's share of the engine: loads the model, sizes the cache, runs steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from pagewire.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire_engine.cpus import model_threads
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.model_files import ModelFiles, load_description
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.rotary import head_dim_of
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.tokenizer_files import load_model_tokenizer
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.cache_engine import CacheEngine, bytes_per_block, staging_bytes
from pagewire_engine.worker.cache_size import CacheSize
from pagewire_engine.worker.cuda_graphs import (
    CudaRecorder,
    GraphSizes,
    timed_capture,
)
from pagewire_engine.worker.device import find_device
from pagewire_engine.worker.exhaustion import telling_exhaustion
from pagewire_engine.worker.kernels import Kernels
from pagewire_engine.worker.largest_step import largest_step
from pagewire_engine.worker.memory import (
    gib,
    measure_graphs,
    measure_largest_step,
    must_fit,
)
from pagewire_engine.worker.model_runner import ModelRunner
from pagewire_engine.worker.pooling_runner import PoolingRunner
from pagewire_engine.worker.precision import cache_dtype, dtype_name, model_dtype, quantizes
from pagewire_engine.worker.weights import load_weights

if TYPE_CHECKING:
    from pagewire_engine.worker.device_runner import DeviceRunner

logger = logging.getLogger(__name__)


class Worker:
    """Holds the model on one device."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, grammars: GrammarCompiler | None = None
    ) -> None:
        """Loads everything.

        Args:
            config: the engine's settings.
            files: the model's.
            grammars: what the requests' constraints are compiled by; None: by one of its own.

        Raises:
            PagewireError: the model, its files or the settings can't be served.
        """
        self._config = config
        self._times = StartupTimes()
        with self._times.phase("device"):
            self._device = find_device(config.device)
        quantized = quantizes(config.quantization, self._device)  # before anything is loaded
        if self._device.type == "cpu":
            torch.set_num_threads(model_threads(config.num_threads))
        self._description = load_description(files, config)
        self._grammars = grammars or GrammarCompiler(
            lambda: load_model_tokenizer(config, files.path, files.gguf),
            vocab_size=self._description.vocab_size,
            eos_token_ids=self._description.eos_token_ids,
        )
        self._dtype = model_dtype(config.dtype, self._description, self._device)
        own = self._dtype
        if quantized and own == torch.float32:
            own = torch.bfloat16  # moves the logits far less than rounded weights do
        self._cache_dtype = cache_dtype(config.kv_cache_dtype, own, self._device)
        head_dim = head_dim_of(self._description.hf_config)
        with self._times.phase("kernels"):
            self._kernels = Kernels(config.attention_backend, self._device, head_dim)
        with self._times.phase("weights"):
            self._model = self._load_model(files)
        self._adapters = self._new_adapters()
        self._max_model_len = self._description.max_model_len
        with self._times.phase("compiling"):
            self._compile_ahead()
        self._cache_size = CacheSize(
            config,
            self._device.type,
            bytes_per_block(self._model.kv_shape, config.block_size, self._cache_dtype),
            self._description.max_model_len,
        )
        self._ran_largest_step = False
        with self._times.phase("largest step"):
            self._num_blocks = self.profile_num_available_blocks()
        self._num_cpu_blocks = self._cache_size.num_cpu_blocks(self._num_blocks)
        self._max_model_len = self._cache_size.longest_sequence(self._num_blocks)
        with self._times.phase("KV blocks"):
            self._runner = self._new_runner(self._allocate_cache())
        with self._times.phase("graphs"):
            self._prepare_to_launch()
        logger.info(
            "%s in %s on %s, %s attention, %d KV blocks of %d tokens in %s and %d in host memory, "
            "sequences up to %d tokens",
            self._description.architecture,
            dtype_name(self._dtype),
            self._device,
            self._kernels.attention.name,
            self._num_blocks,
            config.block_size,
            dtype_name(self._cache_dtype),
            self._num_cpu_blocks,
            self._max_model_len,
        )

    def info(self) -> WorkerInfo:
        """What was loaded."""
        return WorkerInfo(
            architecture=self._description.architecture,
            dtype=dtype_name(self._dtype),
            device=str(self._device),
            vocab_size=self._description.vocab_size,
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
            block_size=self._config.block_size,
            num_cpu_blocks=self._num_cpu_blocks,
            startup_s=self._times.seconds,
        )

    @property
    def launches_ahead(self) -> bool:
        """See Executor.launches_ahead. What pools is computed step by step: most of it is long
        prompts, which hide the host's part."""
        return self._kernels.launch_ahead and self._description.pooler is None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins one step; see Executor.launch."""
        if self._kernels.take_built():
            self._model.use_kernels(self._kernels.dense)
            self._runner.use_kernels(self._kernels.attention)
            if self._adapters is not None:
                self._adapters.use_kernels(self._kernels.dense)
        with telling_exhaustion(self._device):
            if self._adapters is None:
                return self._runner.launch(plan)
            with self._adapters.step_lock:
                return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        return self.launch(plan).result()

    @property
    def adapters(self) -> WorkerAdapters | None:
        """The LoRA adapters; None where none can be loaded."""
        return self._adapters

    def profile_num_available_blocks(self) -> int:
        """Blocks that fit in the memory the settings allow.

        Raises:
            InvalidArgumentError: not even one does, or on CUDA not even the largest step.
        """
        return self._cache_size.num_blocks(self._left_on_device)

    def _left_on_device(self) -> int:
        """Bytes of gpu_memory_utilization that the weights and the largest step leave."""
        cache = self._new_cache(num_blocks=1)
        cache.clear()  # NaN in old memory would make the sampler skip the rows
        runner = self._new_runner(cache)
        memory = measure_largest_step(lambda: self._run_largest_step(runner), self._device)
        # Blocks are swapped through a buffer that is still to come.
        left = memory.left(self._config.gpu_memory_utilization)
        left -= staging_bytes(self._cache_size.block_bytes)
        if not isinstance(runner, ModelRunner | PoolingRunner):
            with must_fit("max_num_seqs", "CUDA graphs of steps", self._device):
                left -= measure_graphs(runner.capture, self._graph_sizes(), self._device)
        return left

    def _run_largest_step(self, runner: ModelRunner | PoolingRunner | DeviceRunner) -> StepResult:
        """Runs it, and forgets its sequences. Block 0 is overwritten."""
        config = self._config
        plan = largest_step(
            self._max_num_tokens,
            config.max_num_seqs,
            self._max_model_len,
            config.block_size,
        )
        result = runner.execute(plan)
        runner.execute(StepPlan(0, forgotten=[each.sequence_id for each in plan.new_sequences]))
        self._ran_largest_step = True
        return result

    def _load_model(self, files: ModelFiles) -> CausalLM:
        model = load_weights(
            files,
            self._description,
            self._config,
            self._dtype,
            self._device,
            self._kernels.dense,
        )
        assert isinstance(model, CausalLM)  # an EncoderWorker has the others
        return model

    def _new_adapters(self) -> WorkerAdapters | None:
        config = self._config
        if not config.enable_lora:
            return None
        return WorkerAdapters(
            self._model,
            self._kernels.dense,
            self._description.architecture,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            dtype=self._dtype,
            device=self._device,
        )

    def _compile_ahead(self) -> None:
        config = self._config
        runner = self._new_runner(self._new_cache(num_blocks=1))
        if isinstance(runner, ModelRunner | PoolingRunner):
            return
        # Late: it loads triton, which only CUDA needs.
        from pagewire_engine.worker.compile_ahead import compile_ahead

        with must_fit("max_num_seqs", "the inputs of a step", self._device):
            compile_ahead(
                runner,
                self._graph_sizes(),
                max_num_seqs=config.max_num_seqs,
                max_num_tokens=self._max_num_tokens,
                max_model_len=self._max_model_len,
                block_size=config.block_size,
            )

    def _allocate_cache(self) -> CacheEngine:
        try:
            return self._new_cache(self._num_blocks, self._num_cpu_blocks)
        except (RuntimeError, MemoryError) as error:  # torch's for memory of every kind, and mmap's
            block_bytes = self._cache_size.block_bytes
            raise InvalidArgumentError(
                self._cache_size.memory_setting,
                f"{gib(self._num_blocks * block_bytes)} of KV blocks on {self._device} and "
                f"{gib(self._num_cpu_blocks * block_bytes)} in host memory can't be allocated; "
                "lower it, or swap_space",
            ) from error

    def _new_cache(self, num_blocks: int, num_cpu_blocks: int = 0) -> CacheEngine:
        return CacheEngine(
            self._model.kv_shape,
            num_blocks,
            self._config.block_size,
            self._cache_dtype,
            self._device,
            num_cpu_blocks,
        )

    def _new_runner(self, cache: CacheEngine) -> ModelRunner | PoolingRunner | DeviceRunner:
        config, description = self._config, self._description
        if description.pooler is not None:
            return PoolingRunner(
                self._model, cache, self._kernels.attention, description.pooler, self._device
            )
        if not self._kernels.launch_ahead:
            return ModelRunner(
                self._model,
                cache,
                self._kernels.attention,
                vocab_size=description.vocab_size,
                eos_token_ids=description.eos_token_ids,
                device=self._device,
                grammars=self._grammars,
                adapters=self._adapters,
            )
        # Late: it loads triton, which only CUDA needs.
        from pagewire_engine.worker.device_runner import DeviceRunner

        with must_fit("max_num_seqs", "the state of so many sequences", self._device):
            return DeviceRunner(
                self._model,
                cache,
                self._kernels.attention,
                vocab_size=description.vocab_size,
                eos_token_ids=description.eos_token_ids,
                device=self._device,
                max_num_seqs=config.max_num_seqs,
                max_num_tokens=self._max_num_tokens,
                max_model_len=description.max_model_len,
                grammars=self._grammars,
                adapters=self._adapters,
            )

    @property
    def _max_num_tokens(self) -> int:
        """Of a step that is launched ahead."""
        return self._config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS["cuda"]

    def _graph_sizes(self) -> GraphSizes:
        config, attention = self._config, self._kernels.attention
        if config.enforce_eager:
            return GraphSizes()
        return GraphSizes.of(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=self._max_num_tokens,
            max_context=config.max_seq_len_to_capture or self._max_model_len,
            num_weights=self._num_weights() if attention.captures_chunks else 0,
        )

    def _num_weights(self) -> int:
        return sum(weights.numel() for weights in self._model.parameters())

    def _prepare_to_launch(self) -> None:
        """Loads what a first step would wait for, and records steps as graphs.

        Raises:
            InvalidArgumentError: there is no memory for it.
        """
        runner, sizes = self._runner, self._graph_sizes()
        if isinstance(runner, ModelRunner | PoolingRunner):
            return
        if not self._ran_largest_step:
            self._run_largest_step(runner)
        if not sizes.count:
            return
        try:
            with timed_capture(sizes.count):
                runner.capture(sizes.graphs(CudaRecorder(self._device)))
        except torch.OutOfMemoryError as error:
            raise InvalidArgumentError(
                self._cache_size.memory_setting,
                f"beside the KV cache there is no memory on {self._device} for CUDA graphs; lower "
                "it or max_num_seqs, or set enforce_eager",
            ) from error
