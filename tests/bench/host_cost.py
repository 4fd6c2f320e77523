"""What a step costs the host of a GPU beside the driver: Python between the launches.

Usage: python -m tests.bench.host_cost [--layers 16] [--steps 50] [--profile]

Runs on any machine with Triton: the device runner launches steps of a narrow Llama on CPU tensors,
where kernels and cuBLAS's products take no time (tests/fakes/null_gpu.py). One line of JSON for
each kind of step, in milliseconds of the thread's processor time. To be added on a GPU: what the
driver takes for a launch (2 to 3 us), and torch for a product (about 5 us).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig

from pagewire.sampling_params import SamplingParams
from pagewire_engine.models.llama import LlamaForCausalLM
from pagewire_engine.step import NewSequence, ScheduledSequence, StepPlan
from pagewire_engine.worker.cache_engine import CacheEngine
from pagewire_engine.worker.device_runner import DeviceRunner
from pagewire_kernels.dispatch_record import recorded
from pagewire_kernels.gpu.attention import TritonAttention
from pagewire_kernels.gpu.dense import TritonDense
from tests.fakes.null_gpu import null_gpu

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 4096
_VOCAB_SIZE = 512
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_MAX_MODEL_LEN, ignore_eos=True)
# What a step computes: sequences that decode, and the lengths of whole prompts beside them.
_STEPS: dict[str, tuple[int, list[int]]] = {
    "decode": (64, []),
    "mixed": (192, [256, 256]),
    "prefill": (0, [2048] * 4),
}


class NullProducts(TritonDense):
    """Triton's launches as they are; cuBLAS's products are the tensors they would fill."""

    def linear(
        self, hidden: torch.Tensor, weight: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.cut_for(hidden, weight) is None:
            return hidden.new_empty(len(hidden), len(weight))
        return super().linear(hidden, weight, bias)

    def linear_add(
        self,
        hidden: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        if self.cut_for(hidden, weight) is None:
            return residual
        return super().linear_add(hidden, weight, bias, residual)


def runner(layers: int) -> DeviceRunner:
    """With a model of so many narrow layers."""
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_MODEL_LEN,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config, _MAX_MODEL_LEN)
    torch.set_default_dtype(torch.float32)
    model.use_kernels(NullProducts())
    return DeviceRunner(
        model,
        CacheEngine(model.kv_shape, 256, _BLOCK_SIZE, torch.bfloat16, _CPU, 0),
        TritonAttention(dependent_launch=True),
        vocab_size=_VOCAB_SIZE,
        eos_token_ids=(1,),
        device=_CPU,
        max_num_seqs=256,
        max_num_tokens=8192,
        max_model_len=_MAX_MODEL_LEN,
    )


class Plans:
    """Steps of one kind, one after another: the same decodes, and prompts that are new each time.

    Args:
        decodes: how many sequences decode.
        prompts: lengths of the prompts.
    """

    def __init__(self, decodes: int, prompts: list[int]) -> None:
        self._prompts = prompts
        self._numbers = itertools.count()
        self._decoding = [self._new(100 + number % 16) for number in range(decodes)]
        self._ended: list[int] = []
        self._num_steps = 0

    def next(self) -> StepPlan:
        """The next step; the first one introduces the sequences that decode."""
        introduced = [self._new(length) for length in self._prompts]
        parts = [self._decode(new) for new in self._decoding]
        parts += [self._whole(new) for new in introduced]
        plan = StepPlan(
            self._num_steps,
            new_sequences=introduced if self._num_steps else [*self._decoding, *introduced],
            scheduled=parts,
            forgotten=self._ended,
        )
        self._ended = [new.sequence_id for new in introduced]
        self._num_steps += 1
        return plan

    def _new(self, length: int) -> NewSequence:
        return NewSequence(next(self._numbers), 0, 0, list(range(length)), [], _GREEDY)

    def _decode(self, new: NewSequence) -> ScheduledSequence:
        start = len(new.prompt_token_ids) - 1 + self._num_steps
        table_start = 0 if self._num_steps == 0 else -(-start // _BLOCK_SIZE)
        blocks = list(range(table_start, start // _BLOCK_SIZE + 1))
        return ScheduledSequence(new.sequence_id, start, 1, table_start, blocks, (new.sequence_id,))

    def _whole(self, new: NewSequence) -> ScheduledSequence:
        length = len(new.prompt_token_ids)
        blocks = list(range(-(-length // _BLOCK_SIZE)))
        return ScheduledSequence(new.sequence_id, 0, length, 0, blocks, (new.sequence_id,))


def measure(kind: str, layers: int, steps: int, profile: bool) -> dict[str, float | int | str]:
    """Milliseconds a step of that kind, and launches of Triton kernels in it."""
    device_runner, plans = runner(layers), Plans(*_STEPS[kind])
    for _ in range(3):
        device_runner.launch(plans.next()).result()
    with recorded() as record:
        device_runner.launch(plans.next()).result()
    gc.collect()
    gc.freeze()
    profiler = cProfile.Profile()
    launch = _profiled(profiler, device_runner.launch) if profile else device_runner.launch
    times = []
    for _ in range(steps):
        plan = plans.next()
        begun = time.thread_time()
        pending = launch(plan)
        times.append(1e3 * (time.thread_time() - begun))
        pending.result()
    gc.unfreeze()
    if profile:
        profiler.print_stats("tottime")
    return {
        "test": "host_cost",
        "step": kind,
        "layers": layers,
        "triton_launches": record.total(),
        "ms_median": round(statistics.median(times), 3),
        "ms_least": round(min(times), 3),
    }


def _profiled(profiler: cProfile.Profile, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda argument: profiler.runcall(call, argument)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of the model")
    parser.add_argument("--steps", type=int, default=50, help="measured of each kind")
    parser.add_argument("--profile", action="store_true", help="print where the time goes as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with null_gpu():
        for kind in _STEPS:
            line = measure(kind, arguments.layers, arguments.steps, arguments.profile)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
