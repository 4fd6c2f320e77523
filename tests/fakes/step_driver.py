"""Runs prompts through a real model runner, and keeps the logits of every position."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from pagewire.config import EngineConfig
from pagewire.sampling_params import SamplingParams
from pagewire_engine.model_files import ModelDescription, load_description, resolve_model
from pagewire_engine.models.base import CausalLM
from pagewire_engine.models.weight_loading import load_model
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.adapters import WorkerAdapters
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.model_runner import ModelRunner
from pagewire_kernels.attention import load_attention_backend
from pagewire_kernels.dense import load_dense_backend

CPU = torch.device("cpu")


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, quantize: bool = False
) -> tuple[CausalLM, ModelDescription]:
    """The model in fp32 on CPU, unless told otherwise."""
    config = EngineConfig(model=str(folder), device="cpu")
    files = resolve_model(config)
    description = load_description(files, config)
    model = load_model(files, description, dtype=dtype, device=CPU, quantize=quantize)
    return model, description


class StepDriver:
    """A scheduler of few lines: chunked prefill of some sequences while others decode.

    Blocks are small and handed out in random order, so that only reading through the block tables
    gives right answers.
    """

    def __init__(
        self,
        model: CausalLM,
        vocab_size: int,
        *,
        block_size: int = 4,
        num_blocks: int = 128,
        chunk: int = 7,
        backend: str = "torch",
        cache_dtype: torch.dtype = torch.float32,
        max_loras: int = 0,
    ) -> None:
        cache = CacheEngine(model.kv_shape, num_blocks, block_size, cache_dtype, CPU)
        for caches in (cache.key_caches, cache.value_caches):
            for tensor in caches:
                tensor.fill_(float("nan"))  # what was never written must never be read
        attention = load_attention_backend(backend, CPU, model.kv_shape.head_dim)
        dense = load_dense_backend(attention.name, CPU)
        model.use_kernels(dense)
        self.adapters: WorkerAdapters | None = None
        if max_loras:
            self.adapters = WorkerAdapters(
                model,
                dense,
                type(model).__name__,
                max_loras=max_loras,
                max_rank=64,
                dtype=torch.float32,
                device=CPU,
            )
        self._model = model
        self._runner = ModelRunner(
            model,
            cache,
            attention,
            vocab_size=vocab_size,
            eos_token_ids=(),
            device=CPU,
            adapters=self.adapters,
        )
        self._block_size = block_size
        self._chunk = chunk
        self._free = random.Random(0).sample(range(num_blocks), num_blocks)

    def greedy(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        adapters: Sequence[int] = (),
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Decodes each prompt.

        Args:
            prompts: of one token or more.
            num_tokens: of each output.
            adapters: the number of each prompt's; none: 0 for all.

        Returns:
            Each sequence's new tokens, and its logits [prompt + num_tokens - 1, vocab].
        """
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        numbers = adapters or [0] * len(prompts)
        new = [
            NewSequence(i, 0, i, prompt, [], params, adapter=number)
            for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        tables: list[list[int]] = [[] for _ in prompts]
        computed = [0] * len(prompts)
        step = 0
        while any(len(output) < num_tokens for output in outputs):
            parts = []
            for i, prompt in enumerate(prompts):
                if len(outputs[i]) == num_tokens:
                    continue
                # Later prompts start later: their chunks run beside the decodes of earlier ones.
                if step >= 2 * i:
                    total = len(prompt) + len(outputs[i])
                    count = min(self._chunk, total - computed[i])
                    parts.append(self._part(i, computed[i], count, total, tables[i]))
            parts.sort(key=lambda part: part.num_tokens > 1)
            recorded: list[torch.Tensor] = []
            handle = self._model.register_forward_hook(
                lambda module, args, hidden, into=recorded: into.append(hidden.clone())
            )
            result = self._runner.execute(StepPlan(step, new if step == 0 else [], parts))
            handle.remove()
            row = 0
            active = None if self.adapters is None else self.adapters.active.rows
            for part in parts:
                rows = slice(row, row + part.num_tokens)
                adapter_rows = None if active is None else active.take(rows)
                logits[part.sequence_id].append(
                    self._model.compute_logits(recorded[0][rows], adapter_rows)
                )
                computed[part.sequence_id] += part.num_tokens
                row += part.num_tokens
            for token in result.sampled:
                outputs[token.sequence_id].append(token.token_id)
            step += 1
        return outputs, [torch.cat(rows) for rows in logits]

    def _part(
        self, sequence_id: int, start: int, count: int, total: int, table: list[int]
    ) -> ScheduledSequence:
        needed = -(-(start + count) // self._block_size)
        table_start = len(table)
        table += [self._free.pop() for _ in range(needed - len(table))]
        sample_for = (sequence_id,) if start + count == total else ()
        return ScheduledSequence(
            sequence_id, start, count, table_start, table[table_start:], sample_for
        )
