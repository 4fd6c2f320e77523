"""One device's share of the engine: loads the model, sizes the cache, runs steps."""

from __future__ import annotations

import logging
import math

import torch

from pagewire.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from pagewire.errors import FailedPreconditionError, InvalidArgumentError
from pagewire.sampling_params import SamplingParams
from pagewire_engine.cpus import model_threads
from pagewire_engine.model_files import ModelDescription, ModelFiles, load_description
from pagewire_engine.models.rotary import head_dim_of
from pagewire_engine.models.weight_loading import load_model
from pagewire_engine.step import (
    NewSequence,
    ScheduledSequence,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from pagewire_engine.worker.cache_engine import CacheEngine, bytes_per_block
from pagewire_engine.worker.memory import default_cpu_cache_bytes, default_swap_bytes
from pagewire_engine.worker.model_runner import ModelRunner
from pagewire_kernels.attention import (
    AttentionBackend,
    BackendUnavailableError,
    load_attention_backend,
)
from pagewire_kernels.dense import load_dense_backend

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Holds the model on one device."""

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Loads everything.

        Raises:
            PagewireError: the model, its files or the settings can't be served.
        """
        self._config = config
        self._device = _device(config.device)
        if self._device.type == "cpu":
            torch.set_num_threads(model_threads(config.num_threads))
        self._description = load_description(files, config)
        self._dtype = _dtype(config.dtype, self._description, self._device)
        head_dim = head_dim_of(self._description.hf_config)
        self._backend = _backend(config.attention_backend, self._device, head_dim)
        self._model = load_model(
            files,
            self._description,
            dtype=self._dtype,
            device=self._device,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
        )
        self._model.use_kernels(load_dense_backend(self._backend.name, self._device, self._dtype))
        self._num_blocks = self.profile_num_available_blocks()
        self._num_cpu_blocks = self._num_blocks_of_swap_space()
        self._max_model_len = self._longest_sequence(self._num_blocks)
        self._runner = self._new_runner(self._num_blocks, self._num_cpu_blocks)
        logger.info(
            "%s in %s on %s, %s attention, %d KV blocks of %d tokens and %d in host memory, "
            "sequences up to %d tokens",
            self._description.architecture,
            str(self._dtype).removeprefix("torch."),
            self._device,
            self._backend.name,
            self._num_blocks,
            config.block_size,
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
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step."""
        return self._runner.execute(plan)

    def profile_num_available_blocks(self) -> int:
        """Blocks that fit in the memory the settings allow.

        Raises:
            InvalidArgumentError: not even one does.
        """
        if self._config.num_gpu_blocks_override is not None:
            return self._config.num_gpu_blocks_override
        memory: int
        setting = "kv_cache_memory"
        if self._config.kv_cache_memory is not None:
            memory = self._config.kv_cache_memory
        elif self._device.type == "cuda":
            memory, setting = self._free_after_largest_step(), "gpu_memory_utilization"
        else:
            memory = default_cpu_cache_bytes()
        block_bytes = self._block_bytes()
        num_blocks = min(memory // block_bytes, self._most_blocks())
        if num_blocks < 1:
            raise InvalidArgumentError(
                setting,
                f"{memory} bytes are left for the KV cache, and one block of "
                f"{self._config.block_size} tokens takes {block_bytes}; allow more memory, or use "
                "a smaller model, dtype or block_size",
            )
        return num_blocks

    def _num_blocks_of_swap_space(self) -> int:
        """Blocks of host memory for swapped requests."""
        memory, block_bytes = self._config.swap_space, self._block_bytes()
        if memory is None:
            # Swapped blocks come from the pool; what a few steps swap out is far less than all.
            return min(default_swap_bytes(self._device.type) // block_bytes, self._num_blocks)
        if 0 < memory < block_bytes:
            raise InvalidArgumentError(
                "swap_space",
                f"one block of {self._config.block_size} tokens takes {block_bytes} bytes, so "
                f"{memory} bytes hold none; give more, or 0 to never swap",
            )
        return min(memory // block_bytes, self._most_blocks())

    def _block_bytes(self) -> int:
        return bytes_per_block(self._model.kv_shape, self._config.block_size, self._dtype)

    def _most_blocks(self) -> int:
        """What all sequences at their longest need; more would never be used."""
        blocks_of_longest = math.ceil(self._description.max_model_len / self._config.block_size)
        return self._config.max_num_seqs * blocks_of_longest

    def _longest_sequence(self, num_blocks: int) -> int:
        """max_model_len, or less where the pool holds less."""
        wanted = self._description.max_model_len
        held = num_blocks * self._config.block_size
        if held >= wanted:
            return wanted
        if self._config.max_model_len is not None:
            raise InvalidArgumentError(
                "max_model_len",
                f"a sequence of {wanted} tokens does not fit the KV cache of {num_blocks} blocks "
                f"({held} tokens); lower it, or raise kv_cache_memory or num_gpu_blocks_override",
            )
        logger.warning(
            "the model can do %d tokens, but the KV cache holds %d: sequences are limited to that; "
            "raise kv_cache_memory for longer ones",
            wanted,
            held,
        )
        return held

    def _new_runner(self, num_blocks: int, num_cpu_blocks: int = 0) -> ModelRunner:
        cache = CacheEngine(
            self._model.kv_shape,
            num_blocks,
            self._config.block_size,
            self._dtype,
            self._device,
            num_cpu_blocks,
        )
        return ModelRunner(
            self._model,
            cache,
            self._backend,
            vocab_size=self._description.vocab_size,
            eos_token_ids=self._description.eos_token_ids,
            device=self._device,
        )

    def _free_after_largest_step(self) -> int:
        """Bytes of gpu_memory_utilization that the weights and the largest step leave."""
        config, device = self._config, self._device
        num_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS["cuda"]
        plan = largest_step(
            num_tokens, config.max_num_seqs, self._description.max_model_len, config.block_size
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        num_blocks = sum(len(part.block_ids) for part in plan.scheduled)
        cache_bytes = num_blocks * bytes_per_block(
            self._model.kv_shape, config.block_size, self._dtype
        )
        self._new_runner(num_blocks).execute(plan)
        torch.cuda.synchronize(device)
        step_bytes = torch.cuda.max_memory_allocated(device) - cache_bytes
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # Memory that other processes or the CUDA context hold, which torch does not count.
        outside = total - free - torch.cuda.memory_reserved(device)
        return int(total * config.gpu_memory_utilization) - step_bytes - outside


def largest_step(
    num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> StepPlan:
    """A plan that prefills `num_tokens` in as many sequences as may be, which all sample."""
    num_tokens = min(num_tokens, max_num_seqs * max_model_len)
    # As many as may be, since each takes a row of logits.
    num_sequences = min(max_num_seqs, num_tokens)
    params = SamplingParams(max_tokens=1)
    new, scheduled, next_block = [], [], 0
    for sequence_id in range(num_sequences):
        length = (num_tokens + sequence_id) // num_sequences
        blocks = list(range(next_block, next_block + math.ceil(length / block_size)))
        next_block += len(blocks)
        new.append(NewSequence(sequence_id, 0, sequence_id, [0] * length, [], params))
        scheduled.append(
            ScheduledSequence(sequence_id, 0, length, 0, blocks, sample_for=(sequence_id,))
        )
    return StepPlan(step=0, new_sequences=new, scheduled=scheduled)


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FailedPreconditionError(
            "no CUDA device is usable here (torch.cuda.is_available() is False); use --device cpu, "
            "or install a CUDA build of torch",
            field="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(name: str, description: ModelDescription, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(description.hf_config, "dtype", None)
    if isinstance(own, str):
        own = _DTYPES.get(own)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _backend(name: str, device: torch.device, head_dim: int) -> AttentionBackend:
    try:
        backend = load_attention_backend(name, device, head_dim)
        if name == "auto" and device.type == "cpu" and backend.name != "cpu":
            try:
                load_attention_backend("cpu", device, head_dim)
            except BackendUnavailableError as error:
                logger.warning("running on the slower %s attention: %s", backend.name, error)
        return backend
    except BackendUnavailableError as error:
        raise FailedPreconditionError(str(error), field="attention_backend") from error
