"""One device's share of the engine: loads the model, sizes the cache, runs steps."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from pagewire.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire_engine.cpus import model_threads
from pagewire_engine.executor.base import PendingStep
from pagewire_engine.model_files import ModelDescription, ModelFiles, load_description
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.rotary import head_dim_of
from pagewire_engine.models.weight_loading import load_model
from pagewire_engine.startup_times import StartupTimes
from pagewire_engine.step import StepPlan, StepResult, WorkerInfo
from pagewire_engine.structured_output import GrammarCompiler
from pagewire_engine.tokenizer_files import load_model_tokenizer
from pagewire_engine.worker.cache_engine import CacheEngine, bytes_per_block, staging_bytes
from pagewire_engine.worker.cuda_graphs import (
    CudaRecorder,
    DecodeGraphs,
    graph_sizes,
    timed_capture,
)
from pagewire_engine.worker.device import find_device
from pagewire_engine.worker.kernels import Kernels
from pagewire_engine.worker.largest_step import largest_step
from pagewire_engine.worker.memory import (
    available_bytes,
    default_cpu_cache_bytes,
    default_swap_bytes,
    gib,
    measure_graphs,
    measure_largest_step,
)
from pagewire_engine.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from pagewire_engine.worker.device_runner import DeviceRunner

logger = logging.getLogger(__name__)

# Blocks beyond what running sequences can need keep prefixes, so many at most: a tiny model's would
# be millions.
_MOST_CACHED_BLOCKS = 16384
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        self._quantizes = _quantizes(config, self._device)
        if self._device.type == "cpu":
            torch.set_num_threads(model_threads(config.num_threads))
        self._description = load_description(files, config)
        self._grammars = grammars or GrammarCompiler(
            lambda: load_model_tokenizer(config, files.path, files.gguf),
            vocab_size=self._description.vocab_size,
            eos_token_ids=self._description.eos_token_ids,
        )
        self._dtype = _dtype(config.dtype, self._description, self._device)
        self._cache_dtype = _cache_dtype(config.kv_cache_dtype, self._dtype, self._device)
        head_dim = head_dim_of(self._description.hf_config)
        with self._times.phase("kernels"):
            self._kernels = Kernels(config.attention_backend, self._device, head_dim)
        with self._times.phase("weights"):
            self._model = self._load_model(files)
        with self._times.phase("compiling"):
            self._compile_ahead()
        self._max_model_len = self._description.max_model_len
        self._ran_largest_step = False
        with self._times.phase("largest step"):
            self._num_blocks = self.profile_num_available_blocks()
        self._num_cpu_blocks = self._num_blocks_of_swap_space()
        self._max_model_len = self._longest_sequence()
        with self._times.phase("KV blocks"):
            self._runner = self._new_runner(self._allocate_cache())
        with self._times.phase("graphs"):
            self._prepare_to_launch()
        logger.info(
            "%s in %s on %s, %s attention, %d KV blocks of %d tokens in %s and %d in host memory, "
            "sequences up to %d tokens",
            self._description.architecture,
            str(self._dtype).removeprefix("torch."),
            self._device,
            self._kernels.attention.name,
            self._num_blocks,
            config.block_size,
            str(self._cache_dtype).removeprefix("torch."),
            self._num_cpu_blocks,
            self._max_model_len,
        )

    def info(self) -> WorkerInfo:
        """What was loaded."""
        return WorkerInfo(
            architecture=self._description.architecture,
            dtype=str(self._dtype).removeprefix("torch."),
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
        """See Executor.launches_ahead."""
        return self._kernels.launch_ahead

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begins one step; see Executor.launch."""
        if self._kernels.take_built():
            self._model.use_kernels(self._kernels.dense)
            self._runner.use_kernels(self._kernels.attention)
        return self._runner.launch(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        return self.launch(plan).result()

    def profile_num_available_blocks(self) -> int:
        """Blocks that fit in the memory the settings allow.

        Raises:
            InvalidArgumentError: not even one does, or on CUDA not even the largest step.
        """
        config = self._config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        memory: int
        if config.kv_cache_memory is not None:
            memory = config.kv_cache_memory
            if self._device.type == "cpu":
                _warn_of_more_than_is_free("kv_cache_memory", memory)
        elif self._device.type == "cuda":
            memory = self._left_on_device()
        else:
            memory = default_cpu_cache_bytes()
        block_bytes = self._block_bytes()
        if memory < block_bytes:
            raise InvalidArgumentError(
                self._memory_setting,
                f"it leaves {gib(memory)} for the KV cache, and one block of {config.block_size} "
                f"tokens takes {gib(block_bytes)}; allow more memory, or use a smaller model, "
                "dtype or block_size",
            )
        most = self._most_running_blocks()
        if config.enable_prefix_caching:
            most = max(most, _MOST_CACHED_BLOCKS)
        return min(memory // block_bytes, most)

    @property
    def _memory_setting(self) -> str:
        """The setting that decides how much memory the KV blocks get."""
        if self._config.num_gpu_blocks_override is not None:
            return "num_gpu_blocks_override"
        if self._config.kv_cache_memory is None and self._device.type == "cuda":
            return "gpu_memory_utilization"
        return "kv_cache_memory"

    def _left_on_device(self) -> int:
        """Bytes of gpu_memory_utilization that the weights and the largest step leave."""
        cache = self._new_cache(num_blocks=1)
        cache.clear()  # NaN in old memory would make the sampler skip the rows
        runner = self._new_runner(cache)
        memory = measure_largest_step(lambda: self._run_largest_step(runner), self._device)
        # Blocks are swapped through a buffer that is still to come.
        left = memory.left(self._config.gpu_memory_utilization)
        left -= staging_bytes(self._block_bytes())
        if not isinstance(runner, ModelRunner):
            left -= measure_graphs(runner.capture, self._graph_sizes(), self._device)
        return left

    def _run_largest_step(self, runner: ModelRunner | DeviceRunner) -> StepResult:
        """Runs it, and forgets its sequences. Block 0 is overwritten."""
        config = self._config
        plan = largest_step(
            config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS["cuda"],
            config.max_num_seqs,
            self._max_model_len,
            config.block_size,
        )
        result = runner.execute(plan)
        runner.execute(StepPlan(0, forgotten=[each.sequence_id for each in plan.new_sequences]))
        self._ran_largest_step = True
        return result

    def _num_blocks_of_swap_space(self) -> int:
        """Blocks of host memory for swapped requests.

        Raises:
            InvalidArgumentError: none, where that can't be what was meant.
        """
        config, block_bytes = self._config, self._block_bytes()
        if config.swap_space is None:
            # Swapped blocks come from the pool; what is swapped at a time is far less than all.
            num_blocks = min(default_swap_bytes(self._device.type) // block_bytes, self._num_blocks)
        else:
            num_blocks = min(config.swap_space // block_bytes, self._most_running_blocks())
            _warn_of_more_than_is_free("swap_space", num_blocks * block_bytes)
        if num_blocks == 0 and (config.swap_space or config.preemption_mode == "swap"):
            raise InvalidArgumentError(
                "swap_space",
                f"one block of {config.block_size} tokens takes {gib(block_bytes)}, so that "
                f"{gib(config.swap_space or 0)} hold none; give more, or 0 together with a "
                "preemption_mode other than swap",
            )
        return num_blocks

    def _block_bytes(self) -> int:
        return bytes_per_block(self._model.kv_shape, self._config.block_size, self._cache_dtype)

    def _most_running_blocks(self) -> int:
        """What the most running sequences need at their longest."""
        blocks_of_longest = math.ceil(self._description.max_model_len / self._config.block_size)
        return self._config.max_num_seqs * blocks_of_longest

    def _longest_sequence(self) -> int:
        """max_model_len, or less where the pool holds less."""
        wanted = self._description.max_model_len
        held = self._num_blocks * self._config.block_size
        if held >= wanted:
            return wanted
        if self._config.max_model_len is not None:
            raise InvalidArgumentError(
                "max_model_len",
                f"a sequence of {wanted} tokens does not fit the KV cache of {self._num_blocks} "
                f"blocks ({held} tokens); lower it, or raise {self._memory_setting}",
            )
        logger.warning(
            "the model can do %d tokens, but the KV cache holds %d: sequences are limited to that; "
            "raise %s for longer ones",
            wanted,
            held,
            self._memory_setting,
        )
        return held

    def _load_model(self, files: ModelFiles) -> CausalLM:
        config = self._config
        try:
            return load_model(
                files,
                self._description,
                dtype=self._dtype,
                device=self._device,
                dummy_seed=config.seed if config.load_format == "dummy" else None,
                dense=self._kernels.dense,
                quantize=self._quantizes,
            )
        except torch.OutOfMemoryError as error:
            _, total = torch.cuda.mem_get_info(self._device)
            raise FailedPreconditionError(
                f"the weights do not fit in the memory of {self._device} ({gib(total)}, shared "
                "with what else runs there); use a smaller model or dtype, or another GPU",
                field="model",
            ) from error

    def _compile_ahead(self) -> None:
        runner = self._new_runner(self._new_cache(num_blocks=1))
        if isinstance(runner, ModelRunner):
            return
        # Late: it loads triton, which only CUDA needs.
        from pagewire_engine.worker.compile_ahead import compile_ahead

        compile_ahead(
            runner,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._description.max_model_len,
            block_size=self._config.block_size,
        )

    def _allocate_cache(self) -> CacheEngine:
        try:
            return self._new_cache(self._num_blocks, self._num_cpu_blocks)
        except RuntimeError as error:  # torch's for memory of every kind
            block_bytes = self._block_bytes()
            raise InvalidArgumentError(
                self._memory_setting,
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

    def _new_runner(self, cache: CacheEngine) -> ModelRunner | DeviceRunner:
        config, description = self._config, self._description
        if not self._kernels.launch_ahead:
            return ModelRunner(
                self._model,
                cache,
                self._kernels.attention,
                vocab_size=description.vocab_size,
                eos_token_ids=description.eos_token_ids,
                device=self._device,
                grammars=self._grammars,
            )
        # Late: it loads triton, which only CUDA needs.
        from pagewire_engine.worker.device_runner import DeviceRunner

        return DeviceRunner(
            self._model,
            cache,
            self._kernels.attention,
            vocab_size=description.vocab_size,
            eos_token_ids=description.eos_token_ids,
            device=self._device,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS["cuda"],
            max_model_len=description.max_model_len,
            grammars=self._grammars,
        )

    def _graph_sizes(self) -> list[int]:
        if self._config.enforce_eager:
            return []
        return graph_sizes(self._config.max_num_seqs)

    def _prepare_to_launch(self) -> None:
        """Loads what a first step would wait for, and records the decode steps as graphs.

        Raises:
            InvalidArgumentError: there is no memory for it.
        """
        runner, sizes = self._runner, self._graph_sizes()
        if isinstance(runner, ModelRunner):
            return
        if not self._ran_largest_step:
            self._run_largest_step(runner)
        if not sizes:
            return
        longest = self._config.max_seq_len_to_capture or self._max_model_len
        try:
            with timed_capture(len(sizes)):
                runner.capture(DecodeGraphs(sizes, longest, CudaRecorder(self._device)))
        except torch.OutOfMemoryError as error:
            raise InvalidArgumentError(
                self._memory_setting,
                f"beside the KV cache there is no memory on {self._device} for CUDA graphs; lower "
                "it or max_num_seqs, or set enforce_eager",
            ) from error


def _warn_of_more_than_is_free(setting: str, memory: int) -> None:
    if memory > (free := available_bytes()):
        logger.warning(
            "%s is %s, but only %s are free: the engine may be killed once it fills",
            setting,
            gib(memory),
            gib(free),
        )


def _dtype(name: str, description: ModelDescription, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(description.hf_config, "dtype", None)
    if isinstance(own, str):
        own = _DTYPES.get(own)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _cache_dtype(name: str, own: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in; `own` is what the model computes in.

    Raises:
        InvalidArgumentError: fp8 where no kernel reads it.
    """
    if name != "fp8":
        return _DTYPES.get(name, own)
    if device.type != "cuda":
        raise InvalidArgumentError(
            "kv_cache_dtype", "fp8 needs a CUDA device; on CPU bfloat16 is the smallest"
        )
    if torch.cuda.get_device_capability(device) < (8, 9):
        raise InvalidArgumentError(
            "kv_cache_dtype",
            f"fp8 needs a GPU of compute capability 8.9 or later, and {device} is older; use auto",
        )
    return torch.float8_e4m3fn


def _quantizes(config: EngineConfig, device: torch.device) -> bool:
    if config.quantization == "none":
        return False
    if device.type != "cpu":
        raise FailedPreconditionError(
            f"{config.quantization} weights have kernels for CPUs only; leave quantization out, or "
            "use --device cpu",
            field="quantization",
        )
    return True
