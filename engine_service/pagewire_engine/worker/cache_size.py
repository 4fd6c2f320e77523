"""How many KV blocks the settings and the memory allow, and how long a sequence they make
possible."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.config import EngineConfig
from pagewire.errors import InvalidArgumentError
from pagewire_engine.worker.memory import (
    available_bytes,
    default_cpu_cache_bytes,
    default_swap_bytes,
    gib,
)

logger = logging.getLogger(__name__)

# Blocks beyond what running sequences can need keep prefixes, so many at most: a tiny model's would
# be millions.
_MOST_CACHED_BLOCKS = 16384


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Sizes a cache.

    Attributes:
        config: the engine's settings.
        device_type: cpu or cuda.
        block_bytes: bytes of a KV block, of all layers.
        max_model_len: the longest sequence that model and settings allow.
    """

    config: EngineConfig
    device_type: str
    block_bytes: int
    max_model_len: int

    def num_blocks(self, left_on_device: Callable[[], int]) -> int:
        """Blocks that fit in the memory the settings allow.

        Args:
            left_on_device: measures the bytes that a GPU has left; called where it decides.

        Raises:
            InvalidArgumentError: not even one fits.
        """
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override
        memory: int
        if config.kv_cache_memory is not None:
            memory = config.kv_cache_memory
            if self.device_type == "cpu":
                _warn_of_more_than_is_free("kv_cache_memory", memory)
        elif self.device_type == "cuda":
            memory = left_on_device()
        else:
            memory = default_cpu_cache_bytes()
        if memory < self.block_bytes:
            raise InvalidArgumentError(
                self.memory_setting,
                f"it leaves {gib(memory)} for the KV cache, and one block of {config.block_size} "
                f"tokens takes {gib(self.block_bytes)}; allow more memory, or use a smaller model, "
                "dtype or block_size",
            )
        most = self._most_running_blocks()
        if config.enable_prefix_caching:
            most = max(most, _MOST_CACHED_BLOCKS)
        return min(memory // self.block_bytes, most)

    def num_cpu_blocks(self, num_blocks: int) -> int:
        """Blocks of host memory for swapped requests.

        Args:
            num_blocks: of the device.

        Raises:
            InvalidArgumentError: none, where that can't be what was meant.
        """
        config = self.config
        if config.swap_space is None:
            # Swapped blocks come from the pool; what is swapped at a time is far less than all.
            num_cpu_blocks = default_swap_bytes(self.device_type) // self.block_bytes
            num_cpu_blocks = min(num_cpu_blocks, num_blocks)
        else:
            num_cpu_blocks = config.swap_space // self.block_bytes
            num_cpu_blocks = min(num_cpu_blocks, self._most_running_blocks())
            _warn_of_more_than_is_free("swap_space", num_cpu_blocks * self.block_bytes)
        if num_cpu_blocks == 0 and (config.swap_space or config.preemption_mode == "swap"):
            raise InvalidArgumentError(
                "swap_space",
                f"one block of {config.block_size} tokens takes {gib(self.block_bytes)}, so that "
                f"{gib(config.swap_space or 0)} hold none; give more, or 0 together with a "
                "preemption_mode other than swap",
            )
        return num_cpu_blocks

    def longest_sequence(self, num_blocks: int) -> int:
        """max_model_len, or less where the pool holds less.

        Raises:
            InvalidArgumentError: less, where the settings ask for max_model_len.
        """
        held = num_blocks * self.config.block_size
        if held >= self.max_model_len:
            return self.max_model_len
        if self.config.max_model_len is not None:
            raise InvalidArgumentError(
                "max_model_len",
                f"a sequence of {self.max_model_len} tokens does not fit the KV cache of "
                f"{num_blocks} blocks ({held} tokens); lower it, or raise {self.memory_setting}",
            )
        logger.warning(
            "the model can do %d tokens, but the KV cache holds %d: sequences are limited to that; "
            "raise %s for longer ones",
            self.max_model_len,
            held,
            self.memory_setting,
        )
        return held

    @property
    def memory_setting(self) -> str:
        """The setting that decides how much memory the KV blocks get."""
        if self.config.num_gpu_blocks_override is not None:
            return "num_gpu_blocks_override"
        if self.config.kv_cache_memory is None and self.device_type == "cuda":
            return "gpu_memory_utilization"
        return "kv_cache_memory"

    def _most_running_blocks(self) -> int:
        """What the most running sequences need at their longest."""
        blocks_of_longest = math.ceil(self.max_model_len / self.config.block_size)
        return self.config.max_num_seqs * blocks_of_longest


def _warn_of_more_than_is_free(setting: str, memory: int) -> None:
    if memory > (free := available_bytes()):
        logger.warning(
            "%s is %s, but only %s are free: the engine may be killed once it fills",
            setting,
            gib(memory),
            gib(free),
        )
